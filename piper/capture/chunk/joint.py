"""The joint graph: one chunk's forward and backward together, before they are cut apart."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from piper.capture.graphs import returned
from piper.ir.passes import Ref


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """A chunk's forward and backward in one graph; a ``Ref`` names each argument and result. It
    equals only itself, so that it can be a key."""

    graph: fx.Graph
    arguments: dict[fx.Node, Ref]
    forward: frozenset[fx.Node]
    """The ops that run in the forward pass; all others belong to the backward pass."""
    results: tuple[tuple[Ref, fx.Node], ...]
    gradients: tuple[tuple[Ref, fx.Node], ...]
    changing: frozenset[int] = frozenset()
    """Buffers whose content has changed by the time the backward runs."""

    def moved_to(self, graph: fx.Graph) -> Joint:
        """This joint on a rewritten ``graph`` with the same arguments and results, in order."""
        names = {node.name for node in self.forward}
        refs = [ref for ref, _ in (*self.results, *self.gradients)]
        pairs = tuple(zip(refs, returned(graph), strict=True))
        n = len(self.results)
        return Joint(
            changing=self.changing,
            graph=graph,
            arguments=dict(
                zip(graph.find_nodes(op="placeholder"), self.arguments.values(), strict=True)
            ),
            forward=frozenset(node for node in graph.nodes if node.name in names),
            results=pairs[:n],
            gradients=pairs[n:],
        )
