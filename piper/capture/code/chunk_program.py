"""The four passes of a chunk as pure functions whose arguments and results have names.

``Ref`` names an argument or result in terms of the chunk: its third parameter, its first saved
tensor, the gradient of its second output. An executor needs nothing else to run a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from piper.capture.graphs import is_random, workspace
from piper.capture.op_costs import pass_cost
from piper.ir.dag.facts import PassCost
from piper.ir.passes import SAVED, Kind, Pass, Ref
from piper.ir.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Function:
    """One pass: a pure graph, the refs of its arguments and results, and its costs."""

    module: fx.GraphModule
    arguments: tuple[Ref, ...]
    results: tuple[Ref, ...]
    cost: PassCost
    workspace: int
    """Bytes that it needs while it runs, beside its arguments and results."""
    random: bool
    """Whether it draws from the device's default generator."""
    consumes: frozenset[Ref] = frozenset()
    """Arguments that nothing reads later: the pass may write its results over them."""

    @staticmethod
    def of(module: fx.GraphModule, arguments: Iterable[Ref], results: Iterable[Ref]) -> Function:
        """The pass that computes ``module``."""
        graph = module.graph
        return Function(
            module,
            tuple(arguments),
            tuple(results),
            pass_cost(graph),
            workspace(graph),
            any(map(is_random, graph.nodes)),
        )

    @property
    def flops(self) -> int:
        return self.cost.flops

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.arguments))}) -> ({', '.join(map(str, self.results))})"


@dataclass(frozen=True, slots=True, eq=False)
class ChunkProgram:
    """All passes of one distinct chunk. A pass with nothing to compute is absent. It equals only
    itself, so that it can be a key."""

    functions: Mapping[Pass, Function]
    specs: Mapping[Ref, TensorSpec]
    """The argument and result tensors of all passes."""

    @property
    def saved(self) -> tuple[TensorSpec, ...]:
        """The tensors that the forward saves for the backward."""
        return tuple(spec for ref, spec in self.specs.items() if ref.kind in SAVED)

    @property
    def bi_saved(self) -> tuple[TensorSpec, ...]:
        """The tensors that BI saves for BW."""
        return tuple(spec for ref, spec in self.specs.items() if ref.kind is Kind.BI_SAVED)

    @property
    def saved_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.saved)

    @property
    def saved_for_bw_bytes(self) -> int:
        """Bytes of the saved tensors that BW reads."""
        return sum(spec.nbytes for ref, spec in self.specs.items() if ref.kind is Kind.SAVED_FOR_BW)

    def consuming(self, refs: set[Ref]) -> ChunkProgram:
        """This program, allowed to overwrite ``refs`` in the last backward pass that reads them."""
        later = set(self.functions[Pass.BW].arguments) if Pass.BW in self.functions else set()
        kept = {Pass.F: refs, Pass.B: set(), Pass.BI: later, Pass.BW: set()}
        functions = {
            which: replace(f, consumes=f.consumes | (refs - kept[which]).intersection(f.arguments))
            for which, f in self.functions.items()
        }
        return replace(self, functions=functions)

    def held(self, reader: Pass) -> tuple[Ref, ...]:
        """The tensors, besides state, that stay alive from the forward until ``reader`` has run."""
        function = self.functions.get(reader)
        state = (Kind.PARAMETER, Kind.BUFFER)
        return tuple(r for r in function.arguments if r.kind not in state) if function else ()
