"""The exported graph goes in; chunks, cut where regions begin and end, come out.

Every edge between chunks is a value that depends on the batch or on parameters and runs from an
earlier chunk to a later one. What depends on neither is computed again in each chunk that uses it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from piper.capture.export import Exported
from piper.capture.graphs import has_tensor, is_random
from piper.capture.regions import Region, tags_of
from piper.capture.tensors import TensorSpec
from piper.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of one microbatch that a chunk takes: a batch input, or what a chunk made."""

    index: int
    name: str
    spec: TensorSpec
    producer: int | None
    """The chunk that makes it; None for a tensor of the batch."""


@dataclass(frozen=True, slots=True)
class Body:
    """A chunk's forward as a function ``(*parameters, *buffers, *inputs) -> (*outputs, *updates)``.

    Chunks whose bodies have equal ``key`` do the same on different tensors.
    """

    module: fx.GraphModule
    parameters: int
    buffers: int
    inputs: int
    outputs: int
    updates: int
    key: str

    def fakes(self) -> list[FakeTensor]:
        """The fake tensors that the body was traced with, one for each argument."""
        return [node.meta["val"] for node in self.module.graph.find_nodes(op="placeholder")]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A maximal run of ops with one stack of regions, and what its body's arguments are."""

    index: int
    tags: tuple[Region, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    updates: tuple[str, ...]
    body: Body

    @property
    def name(self) -> str:
        return "/".join(map(str, self.tags)) or "model"


@dataclass(frozen=True, slots=True)
class Cut:
    """The chunks in an order that respects every edge, and the values between them."""

    chunks: tuple[Chunk, ...]
    values: tuple[Value, ...]
    loss: int
    count: int | None
    outputs: tuple[int, ...]
    updates: frozenset[str]
    """The buffers that some chunk gives a new content."""


def cut(exported: Exported) -> Cut:
    """Cut the graph at the borders of its regions."""
    exported.graph.eliminate_dead_code()
    roots = _roots(exported)
    constants = _constants(exported, roots)
    homes, tags = _assign(exported, constants)
    roots = _update_after_last_read(exported, homes, roots)
    return _Builder(exported, roots, constants, homes, tags).build()


def _roots(exported: Exported) -> tuple[fx.Node, ...]:
    count = () if exported.count is None else (exported.count,)
    return (exported.loss, *count, *exported.outputs, *exported.updates.values())


def _constants(exported: Exported, roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Ops that depend on no parameter, no input and nothing random; results are never constant."""
    fixed = {n for n, name in exported.buffers.items() if name not in exported.updates}
    results = set(roots)
    constants: set[fx.Node] = set()
    for node in exported.graph.nodes:
        if node.op != "call_function" or node in results or is_random(node):
            continue
        if all(arg in constants or arg in fixed for arg in node.all_input_nodes):
            constants.add(node)
    return constants


def _assign(
    exported: Exported, constants: set[fx.Node]
) -> tuple[dict[fx.Node, int], list[tuple[Region, ...]]]:
    """The chunk of every op that is not constant, and the regions of every chunk."""
    ops = [n for n in exported.graph.nodes if n.op == "call_function" and n not in constants]
    changing = {node for node, name in exported.buffers.items() if name in exported.updates}
    in_model = [n for n in ops if tags_of(n.meta)[:1] not in ((), (exported.loss_region,))]
    homes: dict[fx.Node, int] = {}
    tags: list[tuple[Region, ...]] = []
    waiting: dict[fx.Node, int] = {}
    for node in ops:
        stack = tags_of(node.meta)
        feeders = [homes[arg] for arg in node.all_input_nodes if arg in homes]
        if node.target is operator.getitem:
            if feeders:
                homes[node] = feeders[0]  # else with its op, below
        elif stack:
            if not tags or tags[-1] != stack:
                tags.append(stack)
            homes[node] = len(tags) - 1
        elif feeders:
            homes[node] = max(feeders)
        elif not in_model:
            if not tags:
                tags.append(())  # no region in the model: it is one chunk
            homes[node] = 0
        elif changing.isdisjoint(node.all_input_nodes):
            waiting[node] = max(0, len(tags) - 1)
        else:
            homes[node] = max(0, len(tags) - 1)  # what it reads may soon be overwritten
    for node, nearest in reversed(waiting.items()):
        # fed by the batch and parameters alone: with its first user
        users = [u for user in node.users for u in (user.users if not has_tensor(node) else [user])]
        homes[node] = min((homes[user] for user in users if user in homes), default=nearest)
    for node in ops:
        if node.target is operator.getitem:
            homes[node] = homes[node.args[0]]
    return homes, tags


def _update_after_last_read(
    exported: Exported, homes: dict[fx.Node, int], roots: tuple[fx.Node, ...]
) -> tuple[fx.Node, ...]:
    """Where a chunk still reads a buffer's old content after the new one is computed, let that
    chunk, not the one that computes it, be the one that replaces it."""
    for placeholder, name in exported.buffers.items():
        new = exported.updates.get(name)
        if new is None:
            continue
        last = max((homes[user] for user in placeholder.users if user in homes), default=0)
        if last > homes[new]:
            with exported.graph.inserting_before(exported.graph.output_node()):
                late = exported.graph.call_function(torch.ops.aten.clone.default, (new,))
            late.meta["val"] = new.meta["val"]
            homes[late] = last
            exported.updates[name] = late
    return _roots(exported)


def refuse_empty(cut: Cut, regions: Mapping[Region, str], loss_region: Region) -> None:
    """A region that no chunk is in would never match a filter: say so now."""
    held = {region for chunk in cut.chunks for region in chunk.tags}
    for region, where in regions.items():
        if region not in held and region != loss_region:
            raise CaptureError(
                f"region {region} is empty ({where}): it holds no operation on the batch or on "
                "parameters whose result is used; remove it, or put the operations inside"
            )


class _Builder:
    """Numbers the values between chunks and copies each chunk's ops into a body of its own."""

    def __init__(
        self,
        exported: Exported,
        roots: tuple[fx.Node, ...],
        constants: set[fx.Node],
        homes: dict[fx.Node, int],
        tags: list[tuple[Region, ...]],
    ) -> None:
        self.exported = exported
        self.constants = constants
        self.homes = homes
        self.tags = tags
        self.returned = set(roots) - set(exported.updates.values())
        self.returned |= {exported.loss, *exported.outputs}
        self.order = {node: i for i, node in enumerate(exported.graph.nodes)}
        self.values: list[Value] = []
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
        self.values.append(Value(index, name, spec, producer))
        self.numbers[node] = index
        return index

    def _leaves(self, node: fx.Node) -> bool:
        home = self.homes[node]
        return node in self.returned or any(
            self.homes.get(user, home) != home for user in node.users
        )

    def _chunk(self, index: int, members: list[fx.Node]) -> Chunk:
        exported = self.exported
        nodes = sorted({*members, *self._constants_for(members)}, key=self.order.__getitem__)
        inside = set(nodes)
        taken = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        parameters = [n for n in taken if n in exported.parameters]
        buffers = [n for n in taken if n in exported.buffers]
        inputs = [n for n in taken if n in self.numbers]
        outputs = [n for n in members if self._leaves(n)]
        updates = {name: n for name, n in exported.updates.items() if n in inside}
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
            body=_body(nodes, aliases, buffers, inputs, outputs, list(updates.values())),
        )

    def _constants_for(self, members: list[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        stack = [arg for node in members for arg in node.all_input_nodes if arg in self.constants]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(arg for arg in node.all_input_nodes if arg in self.constants)
        return found


def _body(
    nodes: list[fx.Node],
    parameters: dict[fx.Node, int],
    buffers: list[fx.Node],
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    updates: list[fx.Node],
) -> Body:
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
        module=fx.GraphModule(torch.nn.Module(), graph),
        parameters=len(first),
        buffers=len(buffers),
        inputs=len(inputs),
        outputs=len(outputs),
        updates=len(updates),
        key=_key(graph),
    )


def _placeholder(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = like.meta["val"]
    return node


def _key(graph: fx.Graph) -> str:
    """A text equal for two graphs just when they compute the same function."""
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
