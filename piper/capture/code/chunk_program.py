"""The four passes of a chunk as pure functions whose arguments and results have names.

``Ref`` says what an argument or result is in terms of the chunk: its third parameter, its first
saved tensor, the gradient of its second output. An executor needs nothing else to run a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from piper.ir.passes import SAVED, Kind, Pass, Ref
from piper.ir.tensors import TensorSpec


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
