"""The part of a captured model that a worker needs: the programs of all chunks, at the shapes of
each group size, and the names of their arguments and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.totals import Totals
from piper.capture.model import Captured
from piper.ir.passes import Kind, Ref
from piper.ir.shards import Draws
from piper.ir.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class ChunkSignature:
    """The names of a chunk's arguments and results, in the order of its programs' refs."""

    name: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    updates: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    draws: Draws | None = None
    """The random draws of its segment, if it has any."""


@dataclass(frozen=True, slots=True)
class Executables:
    """The programs of all chunks, at the shapes of each group size."""

    pieces: tuple[ChunkSignature, ...]
    programs: Mapping[int, tuple[ChunkProgram, ...]]
    """By group size, one for each chunk; equal chunks share one object."""
    values: Mapping[int, tuple[TensorSpec, ...]]
    """By group size, the values between chunks; the batch's tensors come first."""
    loss: int
    count: int | None
    outputs: Mapping[str, int]
    """The values reported beside the loss, by name."""
    constants: Mapping[str, Tensor]
    parameters: Mapping[str, TensorSpec]
    """The specs of the unsharded parameters, by name, as the programs take them."""
    mixes: str | None = None
    """The operation that computes rows of the batch from one another, with its line; None if none
    is known."""
    totals: Totals | None = None
    """Sums over the whole batch that the programs take: values after those of the batch's
    tensors."""

    @staticmethod
    def of(
        captured: Mapping[int, Captured], programs: Mapping[int, tuple[ChunkProgram, ...]]
    ) -> Executables:
        first = next(iter(captured.values()))
        return Executables(
            pieces=tuple(
                ChunkSignature(
                    c.name, c.parameters, c.buffers, c.updates, c.inputs, c.outputs, c.draws
                )
                for c in first.chunks
            ),
            programs=programs,
            values={n: tuple(v.spec for v in c.cut.values) for n, c in captured.items()},
            loss=first.cut.loss,
            count=first.cut.count,
            outputs=outputs_of(first),
            constants=first.constants,
            parameters=parameter_specs(first),
            mixes=None if first.mixing is None else first.mixing.of_rows,
            totals=captured[max(captured)].totals,
        )


def parameter_specs(captured: Captured) -> dict[str, TensorSpec]:
    """The specs of the unsharded parameters, by name."""
    return {
        name: captured.whole.get(name) or program.specs[Ref(Kind.PARAMETER, i)]
        for chunk, program in zip(captured.chunks, captured.programs, strict=True)
        for i, name in enumerate(chunk.parameters)
    }


def outputs_of(captured: Captured) -> dict[str, int]:
    """The values reported beside the loss, by name."""
    if captured.output_tree.spec is None:
        return {}
    return dict(captured.output_tree.put(captured.cut.outputs))
