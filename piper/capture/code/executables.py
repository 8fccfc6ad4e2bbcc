"""The part of a captured model that a worker needs: the programs of all chunks, at the shapes of
each group size, and the names of their arguments and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.totals import Totals
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
