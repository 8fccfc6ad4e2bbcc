"""Chunks joined into one graph, each distinct one once: a value that one of them makes and another
reads is one node, and so is a parameter with several users.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx

from piper.capture.chunk.chunks import Chunk, Cut
from piper.capture.graphs import returned


@dataclass(frozen=True, slots=True)
class Joined:
    """The graph of some chunks."""

    graph: fx.Graph
    parameters: dict[str, fx.Node] = field(default_factory=dict)
    buffers: dict[str, fx.Node] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    """Tensors of the batch, and values of chunks that are not in it."""


def joined(cut: Cut, wanted: Collection[int]) -> Joined:
    """The graph of the ``wanted`` chunks, of equal ones that of the first."""
    first: dict[str, Chunk] = {}
    for chunk in cut.chunks:
        if chunk.index in wanted:
            first.setdefault(chunk.body.key, chunk)
    made = Joined(fx.Graph())
    values: dict[int, fx.Node] = {}
    for chunk in first.values():
        _add(made, chunk, values)
    kept = {chunk.index for chunk in first.values()}
    read = {v for chunk in cut.chunks if chunk.index not in kept for v in chunk.inputs}
    ends = {*read, *cut.outputs, cut.loss} & values.keys()
    made.graph.output(tuple(values[v] for v in sorted(ends)))
    return made


def _add(made: Joined, chunk: Chunk, values: dict[int, fx.Node]) -> None:
    graph, body = made.graph, chunk.body
    new: dict[fx.Node, fx.Node] = {}
    places = iter(body.module.graph.find_nodes(op="placeholder"))
    for known, names in ((made.parameters, chunk.parameters), (made.buffers, chunk.buffers)):
        for name, place in zip(names, places, strict=False):
            if name not in known:
                known[name] = _argument(made, place)
            new[place] = known[name]
    for value, place in zip(chunk.inputs, places, strict=True):
        if value not in values:
            values[value] = _argument(made, place)
            made.inputs.append(values[value])
        new[place] = values[value]
    for node in body.module.graph.nodes:
        if node.op == "call_function":
            new[node] = graph.node_copy(node, new.__getitem__)
    for value, node in zip(chunk.outputs, returned(body.module.graph), strict=False):
        values[value] = new[node]


def _argument(made: Joined, like: fx.Node) -> fx.Node:
    """A new argument of the graph; it may come after operations of earlier chunks."""
    node = made.graph.placeholder(f"a{len(made.graph.nodes)}")
    node.meta["val"] = like.meta["val"]
    return node
