"""The four passes of a chunk as pure functions whose arguments and results have names.

``Ref`` says what an argument or result is in terms of the chunk: its third parameter, its first
saved tensor, the gradient of its second output. An executor needs nothing else to run a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from torch import fx

from piper.ir.tensors import TensorSpec


class Pass(Enum):
    """The part of a chunk's step that a function computes."""

    F = "F"
    """forward"""
    B = "B"
    """backward, whole"""
    BI = "BI"
    """backward for the inputs: what the chunk before waits for"""
    BW = "BW"
    """backward for the weights: the rest, at any later time"""

    __hash__ = object.__hash__  # Enum's own is slow, and these are looked up millions of times


class Kind(Enum):
    """What a tensor is to its chunk."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    OUTPUT = "output"
    UPDATE = "update"
    """The new content of a buffer."""
    SAVED = "saved"
    """Kept from the forward for B or BI; neither an input nor an output."""
    SAVED_FOR_BW = "saved_bw"
    """Saved by the forward for the weight backward (B or BW), which may come much later."""
    BI_SAVED = "bi_saved"
    """Computed by BI on the way, and saved for the weight backward, BW."""
    OUTPUT_GRAD = "output_grad"
    INPUT_GRAD = "input_grad"
    PARAMETER_GRAD = "parameter_grad"

    __hash__ = object.__hash__


SAVED = (Kind.SAVED, Kind.SAVED_FOR_BW)
"""What the forward makes for the backward alone."""
BUNDLES = (*SAVED, Kind.BI_SAVED, Kind.PARAMETER_GRAD)
"""What plans know as one value, however many tensors it is."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The ``index``-th tensor of a kind."""

    kind: Kind
    index: int
    term: int = 0
    """Of the gradient of an input that later chunks read too: which of the terms that this chunk
    adds to it, one for each use."""

    def __str__(self) -> str:
        return f"{self.kind.value}{self.index}" + (f"+{self.term}" if self.term else "")


@dataclass(frozen=True, slots=True)
class Function:
    """One pass: a pure graph, what its arguments and results are, and what it costs."""

    module: fx.GraphModule
    arguments: tuple[Ref, ...]
    results: tuple[Ref, ...]
    flops: int
    moved: int
    """Bytes that its operations read and write, each by itself."""
    moved_fused: int
    """The same if all but matrix products and the like are fused."""
    workspace: int
    """Bytes it needs for a while beside its arguments and results."""
    random: bool
    """Whether it draws from the device's default generator."""
    consumes: frozenset[Ref] = frozenset()
    """Arguments that nothing reads after it, so that it may write its results over them."""

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.arguments))}) -> ({', '.join(map(str, self.results))})"


@dataclass(frozen=True, slots=True)
class ChunkProgram:
    """All passes of one distinct chunk. A pass that has nothing to compute is absent."""

    functions: Mapping[Pass, Function]
    specs: Mapping[Ref, TensorSpec]
    """Every tensor that any pass takes or makes."""

    @property
    def saved(self) -> tuple[TensorSpec, ...]:
        """The tensors made by the forward only to be kept for the backward."""
        return tuple(spec for ref, spec in self.specs.items() if ref.kind in SAVED)

    @property
    def bi_saved(self) -> tuple[TensorSpec, ...]:
        """The tensors that BI keeps for BW."""
        return tuple(spec for ref, spec in self.specs.items() if ref.kind is Kind.BI_SAVED)

    @property
    def saved_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.saved)

    @property
    def saved_for_bw_bytes(self) -> int:
        """Of the saved ones, those that BW reads."""
        return sum(spec.nbytes for ref, spec in self.specs.items() if ref.kind is Kind.SAVED_FOR_BW)

    def consuming(self, refs: set[Ref]) -> ChunkProgram:
        """This program, free to overwrite ``refs`` in the last backward pass that reads them."""
        later = set(self.functions[Pass.BW].arguments) if Pass.BW in self.functions else set()
        kept = {Pass.F: refs, Pass.B: set(), Pass.BI: later, Pass.BW: set()}
        functions = {
            which: replace(f, consumes=f.consumes | (refs - kept[which]).intersection(f.arguments))
            for which, f in self.functions.items()
        }
        return replace(self, functions=functions)

    def held(self, reader: Pass) -> tuple[Ref, ...]:
        """What must stay alive after the forward, besides state, until ``reader`` has run."""
        function = self.functions.get(reader)
        state = (Kind.PARAMETER, Kind.BUFFER)
        return tuple(r for r in function.arguments if r.kind not in state) if function else ()
