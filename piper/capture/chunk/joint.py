"""The joint graph: one chunk's forward and backward together, before they are cut apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from piper.capture.graphs import returned
from piper.ir.passes import Ref

Stride = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """Which of a chunk's arguments and results take part in differentiation."""

    parameters: tuple[bool, ...]
    """Parameters that are trained."""
    inputs: tuple[bool, ...]
    """Inputs through which gradient must flow further back."""
    outputs: tuple[Stride | None, ...]
    """For each output that receives a gradient from later chunks, the gradient's strides."""
    apart: tuple[bool, ...]
    """Inputs for which later chunks make a gradient too: the terms of the uses here stay separate,
    and are added to that gradient one after another."""
    changing: tuple[bool, ...]
    """Buffers that some chunk updates: the backward cannot read their old content again."""


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
    demand: Demand

    def moved_to(self, graph: fx.Graph) -> Joint:
        """This joint on a rewritten ``graph`` with the same arguments and results, in order."""
        names = {node.name for node in self.forward}
        refs = [ref for ref, _ in (*self.results, *self.gradients)]
        pairs = tuple(zip(refs, returned(graph), strict=True))
        arguments = zip(graph.find_nodes(op="placeholder"), self.arguments.values(), strict=True)
        n = len(self.results)
        return replace(
            self,
            graph=graph,
            arguments=dict(arguments),
            forward=frozenset(node for node in graph.nodes if node.name in names),
            results=pairs[:n],
            gradients=pairs[n:],
        )
