"""Cuts the exported graph into chunks at the borders of its regions.

Every edge between chunks is a value that depends on the batch or on parameters and runs from an
earlier chunk to a later one. Each chunk recomputes the constants it uses, and values that depend on
the batch alone and are larger than their sources (``recomputing``).
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from piper.capture.chunk.assign import assign, constants_of, update_after_last_read
from piper.capture.chunk.chunks import Body, Chunk, ChunkValue, Cut
from piper.capture.chunk.expert_regions import narrow_expert_regions
from piper.capture.chunk.recomputing import recomputed_of
from piper.capture.graphs import module_of
from piper.capture.regions import Region
from piper.capture.trace.exported import Exported
from piper.ir.tensors import TensorSpec


def cut(exported: Exported) -> Cut:
    """Cut the graph at the borders of its regions; ``exported`` is used up."""
    exported.graph.eliminate_dead_code()
    closed = narrow_expert_regions(exported)
    constants = constants_of(exported)
    homes, tags = assign(exported, constants, closed)
    update_after_last_read(exported, homes)
    recomputed, by = recomputed_of(exported, constants, homes)
    return _Builder(exported, constants | recomputed, constants | by, homes, tags).build()


class _Builder:
    """Numbers the values between chunks and copies each chunk's ops into a body of its own."""

    def __init__(
        self,
        exported: Exported,
        recomputed: set[fx.Node],
        recomputed_by: set[fx.Node],
        homes: dict[fx.Node, int],
        tags: list[tuple[Region, ...]],
    ) -> None:
        self.exported = exported
        self.recomputed, self.recomputed_by = recomputed, recomputed_by
        self.homes = homes
        self.tags = tags
        self.returned = {exported.loss, exported.count, *exported.outputs}
        self.order = {node: i for i, node in enumerate(exported.graph.nodes)}
        self.values: list[ChunkValue] = []
        self.numbers: dict[fx.Node, int] = {}

    def build(self) -> Cut:
        for node in self.exported.inputs:
            self._number(node, None)
        members: list[list[fx.Node]] = [[] for _ in self.tags]
        for node, home in sorted(self.homes.items(), key=lambda item: self.order[item[0]]):
            members[home].append(node)
        chunks = tuple(self._chunk(i, nodes) for i, nodes in enumerate(members))
        exported = self.exported
        return Cut(
            chunks=chunks,
            values=tuple(self.values),
            loss=self.numbers[exported.loss],
            count=None if exported.count is None else self.numbers[exported.count],
            outputs=tuple(self.numbers[node] for node in exported.outputs),
            updates=frozenset(exported.updates),
        )

    def _number(self, node: fx.Node, producer: int | None) -> int:
        index = len(self.values)
        spec = TensorSpec.of(node.meta["val"])
        name = self.exported.inputs.get(node, node.name)
        self.values.append(ChunkValue(index, name, spec, producer))
        self.numbers[node] = index
        return index

    def _leaves(self, node: fx.Node) -> bool:
        home = self.homes[node]
        return node in self.returned or any(
            self.homes.get(user, home) != home for user in node.users
        )

    def _chunk(self, index: int, members: list[fx.Node]) -> Chunk:
        exported = self.exported
        again = recomputed_for(members, self.recomputed, self.recomputed_by)
        nodes = sorted({*members, *again}, key=self.order.__getitem__)
        inside, taken = set(nodes), read_by(nodes)
        parameters = [n for n in taken if n in exported.parameters]
        inputs = [n for n in taken if n in self.numbers]
        outputs = [n for n in members if self._leaves(n)]
        updates = {name: n for name, n in exported.updates.items() if n in inside}
        # a buffer that the chunk only writes is an argument as well
        written = [n for n, name in exported.buffers.items() if name in updates and n not in taken]
        buffers = [n for n in taken if n in exported.buffers] + written
        # a tied parameter has one placeholder for each of its paths, but is one argument
        unique = list(dict.fromkeys(exported.parameters[n] for n in parameters))
        aliases = {n: unique.index(exported.parameters[n]) for n in parameters}
        return Chunk(
            index=index,
            tags=self.tags[index],
            parameters=tuple(unique),
            buffers=tuple(exported.buffers[n] for n in buffers),
            inputs=tuple(self.numbers[n] for n in inputs),
            outputs=tuple(self._number(n, index) for n in outputs),
            updates=tuple(updates),
            body=body_of(nodes, aliases, buffers, inputs, outputs, list(updates.values())),
        )


def recomputed_for(
    members: list[fx.Node], recomputed: Collection[fx.Node], by: Collection[fx.Node]
) -> set[fx.Node]:
    """The ops of ``by`` that are run again for the values in ``recomputed`` that ``members``
    read."""
    needed: set[fx.Node] = set()
    stack = [arg for node in members for arg in node.all_input_nodes if arg in recomputed]
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in needed:
            needed.add(node)
            stack += [arg for arg in node.all_input_nodes if arg in by]
    return needed


def read_by(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """The values from outside that ``nodes`` read."""
    inside = set(nodes)
    return list(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside))


def body_of(
    nodes: list[fx.Node],
    parameters: dict[fx.Node, int],
    buffers: list[fx.Node],
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    updates: list[fx.Node],
) -> Body:
    """``nodes`` as a function of the values they read from outside. ``parameters`` gives each
    node's argument number; tied parameters share one."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    first: dict[int, fx.Node] = {}
    for node, index in parameters.items():
        if index not in first:
            first[index] = _placeholder(graph, f"p{index}", node)
        new[node] = first[index]
    for kind, group in (("b", buffers), ("x", inputs)):
        for index, node in enumerate(group):
            new[node] = _placeholder(graph, f"{kind}{index}", node)
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[n] for n in (*outputs, *updates)))
    return Body(
        module=module_of(graph),
        parameters=len(first),
        buffers=len(buffers),
        inputs=len(inputs),
        outputs=len(outputs),
        updates=len(updates),
        key=body_key(graph),
    )


def _placeholder(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = like.meta["val"]
    return node


def body_key(graph: fx.Graph) -> str:
    """A text that is equal for two graphs exactly when their ops and argument specs are equal."""
    number: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        number[node] = f"%{len(number)}"
        if node.op == "placeholder":
            lines.append(
                f"{node.name[0]} {TensorSpec.of(node.meta['val'])} {node.meta['val'].stride()}"
            )
        else:
            args = fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
            lines.append(f"{node.target} {args!r}")
    return "\n".join(lines)
