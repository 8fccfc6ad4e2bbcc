"""Tensor parallelism on a cut model: chunks whose parameters are sharded along an axis are replaced
by their segments, at the shapes of one device's share.

    layer ─▶      norm ─▶ [R -> R] ─▶ attention ─▶ [P -> R] ─▶ add, norm ─▶ [R -> R] ─▶ mlp ─▶ ...

A segment is a chunk like any other, and so is a redistribution, until lowering makes collectives
of it: order, overlap, memory, remat and BI/BW know nothing of tensor parallelism.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard
from torch.fx.experimental.proxy_tensor import make_fx

from piper.capture.chunks import (
    RANK,
    Body,
    Chunk,
    ChunkValue,
    Cut,
    Draws,
    Move,
    ParameterShard,
    Segment,
)
from piper.capture.cut import body_key
from piper.capture.fused import Packed
from piper.capture.local_graph import Given, stand_in
from piper.capture.propagation import Local, propagate
from piper.capture.sharding_rules import REPLICATED, Placement, Rules
from piper.capture.tensors import TensorSpec
from piper.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one chunk is sharded along an axis."""

    axis: str
    ways: int
    stride: int
    """How far apart neighbours along the axis are."""
    parameters: Mapping[str, ParameterShard]
    sequence: int | None = None
    """The dimension along which what would be replicated between its parts is sharded instead."""
    split: int | None = None
    """The dimension along which the tensors of the batch are sharded."""


def segmented(cut: Cut, shardings: Mapping[int, Sequence[Sharding]]) -> Cut:
    """``cut`` with the chunks in ``shardings`` replaced by their segments, axis after axis."""
    axes = list(dict.fromkeys(s.axis for row in shardings.values() for s in row))
    origin = list(range(len(cut.chunks)))
    for axis in axes:
        rows = {i: shardings.get(of, ()) for i, of in enumerate(origin)}
        segmenter = _Segmenter(
            cut, {i: s for i, row in rows.items() for s in row if s.axis == axis}
        )
        cut = segmenter.cut()
        origin = [origin[i] for i in segmenter.origin]
    return cut


class _Segmenter:
    def __init__(self, cut: Cut, shardings: Mapping[int, Sharding]) -> None:
        self._cut = cut
        self._shardings = shardings
        self._rules = {s.ways: Rules(s.ways) for s in shardings.values()}
        self._locals: dict[object, Local] = {}
        self._stand_ins: dict[object, Body] = {}
        self._chunks: list[Chunk] = []
        self.origin: list[int] = []
        """For each chunk, the one that it is a segment of."""
        self._values: list[ChunkValue] = []
        self._numbers: dict[int, int] = {}
        """By value of the cut, its number now."""
        self._edges: dict[int, Placement] = {}
        """How the values between chunks are placed along the axis."""

    def cut(self) -> Cut:
        old = self._cut
        for value in old.values:
            if value.producer is None:
                self._numbers[value.index] = self._value(value.name, value.spec, None)
                self._edges[value.index] = REPLICATED
        for chunk in old.chunks:
            sharding = self._shardings.get(chunk.index)
            if sharding is None:
                self._keep(chunk)
            else:
                self._segment(chunk, sharding)
        return Cut(
            chunks=tuple(self._chunks),
            values=tuple(self._values),
            loss=self._numbers[old.loss],
            count=None if old.count is None else self._numbers[old.count],
            outputs=tuple(self._numbers[value] for value in old.outputs),
            updates=old.updates,
        )

    def _wanted(self, value: int, sharding: Sharding) -> Placement | None:
        """How a value must be placed along the axis that ``sharding`` is along: open where all who
        read it are sharded in the same way."""
        if value in (self._cut.loss, self._cut.count, *self._cut.outputs):
            return REPLICATED
        readers = [c.index for c in self._cut.chunks if value in c.inputs]
        same = all(_same(self._shardings.get(i), sharding) for i in readers)
        return None if same else REPLICATED

    def _split(self, value: int, sharding: Sharding) -> int | None:
        """The dimension along which a tensor of the batch is sharded where it is read."""
        dim, found = sharding.split, self._cut.values[value]
        if dim is None or found.producer is not None:
            return None
        batch = [v.spec.shape for v in self._cut.values if v.producer is None]
        length = next((shape[dim] for shape in batch if len(shape) > dim), None)
        if len(found.spec.shape) <= dim or found.spec.shape[dim] != length:
            return None
        if length % sharding.ways:
            raise CaptureError(
                f"{found.name} has a sequence of {length}, which {sharding.ways} devices along "
                f"{sharding.axis} cannot share evenly: pad it to a multiple"
            )
        return dim

    def _value(self, name: str, spec: TensorSpec, producer: int | None) -> int:
        index = len(self._values)
        self._values.append(ChunkValue(index, name, spec, producer))
        return index

    def _keep(self, chunk: Chunk) -> None:
        index = len(self._chunks)
        self.origin.append(chunk.index)
        for value in chunk.outputs:
            old = self._cut.values[value]
            self._numbers[value] = self._value(old.name, old.spec, index)
            self._edges[value] = REPLICATED
        self._chunks.append(
            replace(
                chunk,
                index=index,
                inputs=tuple(self._numbers[v] for v in chunk.inputs),
                outputs=tuple(self._numbers[v] for v in chunk.outputs),
                draws=chunk.draws or Draws(chunk.index),
            )
        )

    def _segment(self, chunk: Chunk, sharding: Sharding) -> None:
        local = self._local(chunk, sharding)
        levels = _levels(local)
        rows: defaultdict[int, list[fx.Node]] = defaultdict(list)
        moves: defaultdict[int, list[fx.Node]] = defaultdict(list)
        for node, level in levels.items():
            (moves if node in local.moves else rows)[level].append(node)
        pieces = _Pieces(self, chunk, sharding, local, levels)
        for level in sorted({*rows, *moves}):
            if rows[level]:
                pieces.compute(rows[level], sharded=level % 2 == 1)
            for node in moves[level]:
                pieces.move(node)
        ends = zip(chunk.outputs, local.results, local.placements, strict=False)
        for value, node, placement in ends:
            self._numbers[value] = pieces.numbers[node]
            self._edges[value] = placement

    def _local(self, chunk: Chunk, sharding: Sharding) -> Local:
        given: list[Given] = []
        for name in chunk.parameters:
            shard = sharding.parameters.get(name)
            if shard is None:
                given.append(REPLICATED)
            elif shard.sections:
                given.append(Packed(shard.dim, shard.sections))
            else:
                given.append(Shard(shard.dim))
        given += [REPLICATED] * len(chunk.buffers)
        given += [self._edges[value] for value in chunk.inputs]
        split = tuple(self._split(value, sharding) for value in chunk.inputs)
        wanted: list[Placement | None] = [self._wanted(v, sharding) for v in chunk.outputs]
        wanted += [REPLICATED] * len(chunk.updates)
        key = chunk.body.key, sharding.ways, sharding.sequence, tuple(given), tuple(wanted), split
        if key not in self._locals:
            self._locals[key] = propagate(
                chunk.body,
                self._rules[sharding.ways],
                sharding.ways,
                given,
                wanted,
                _resolved(sharding.sequence, sharding.ways),
                split,
                chunk.name,
            )
        return self._locals[key]

    def stand_in(self, move: Move, fake: Tensor, ways: int) -> Body:
        """A body of the shapes of a redistribution, for autograd."""
        key = move, TensorSpec.of(fake), tuple(fake.stride()), ways
        if key not in self._stand_ins:
            module = make_fx(stand_in(move, ways))(fake)
            output = module.graph.output_node()
            output.args = ((output.args[0],),)
            module.recompile()
            self._stand_ins[key] = Body(module, 0, 0, 1, 1, 0, body_key(module.graph))
        return self._stand_ins[key]

    def add(
        self,
        chunk: Chunk,
        segment: Segment,
        body: Body,
        parameters: Sequence[str],
        buffers: Sequence[str],
        updates: Sequence[str],
        inputs: Sequence[int],
        outputs: Sequence[tuple[str, TensorSpec]],
        draws: Draws | None = None,
    ) -> list[int]:
        """One more chunk; gives the numbers of what it makes."""
        index = len(self._chunks)
        self.origin.append(chunk.index)
        made = [self._value(name, spec, index) for name, spec in outputs]
        self._chunks.append(
            Chunk(
                index=index,
                tags=chunk.tags,
                parameters=tuple(parameters),
                buffers=tuple(buffers),
                inputs=tuple(inputs),
                outputs=tuple(made),
                updates=tuple(updates),
                body=body,
                segments=(*chunk.segments, segment),
                draws=draws,
            )
        )
        return made

    def numbers(self, chunk: Chunk) -> list[int]:
        return [self._numbers[value] for value in chunk.inputs]


class _Pieces:
    """The segments of one chunk, in order."""

    def __init__(
        self,
        out: _Segmenter,
        chunk: Chunk,
        sharding: Sharding,
        local: Local,
        levels: Mapping[fx.Node, int],
    ) -> None:
        self._out, self._chunk, self._sharding, self._share = out, chunk, sharding, local
        self._levels = levels
        body = chunk.body
        first = body.parameters + body.buffers
        self._parameters = dict(
            zip(local.arguments[: body.parameters], chunk.parameters, strict=True)
        )
        self._buffers = dict(
            zip(local.arguments[body.parameters : first], chunk.buffers, strict=True)
        )
        if local.rank is not None:
            self._buffers[local.rank] = RANK + sharding.axis
        self.numbers = dict(zip(local.arguments[first:], out.numbers(chunk), strict=True))
        """The number of each value between segments, by its node in the share's graph."""
        self._updates = dict(zip(local.results[body.outputs :], chunk.updates, strict=True))
        self._ends = set(local.results)
        self._count = 0
        self._order = {node: i for i, node in enumerate(local.graph.nodes)}

    def compute(self, nodes: list[fx.Node], *, sharded: bool) -> None:
        """A segment of operations."""
        inside = set(nodes) | self._constants_of(nodes)
        ordered = sorted(inside, key=self._order.__getitem__)
        taken = list(
            dict.fromkeys(a for n in ordered for a in n.all_input_nodes if a not in inside)
        )
        parameters = [n for n in taken if n in self._parameters]
        buffers = [n for n in taken if n in self._buffers]
        inputs = [n for n in taken if n in self.numbers]
        assert len(parameters) + len(buffers) + len(inputs) == len(taken)
        updates = {self._updates[n]: n for n in ordered if n in self._updates}
        outputs = [n for n in nodes if self._leaves(n, inside)]
        body = _body(ordered, parameters, buffers, inputs, outputs, list(updates.values()))
        names = [self._parameters[n] for n in parameters]
        draws = self._draws(ordered)
        shards = self._sharding.parameters
        made = self._out.add(
            self._chunk,
            self._segment(sharded=sharded, names=[n for n in names if n in shards]),
            body,
            names,
            [self._buffers[n] for n in buffers],
            list(updates),
            [self.numbers[n] for n in inputs],
            [(n.name, TensorSpec.of(n.meta["val"])) for n in outputs],
            draws,
        )
        self.numbers |= zip(outputs, made, strict=True)

    def move(self, node: fx.Node) -> None:
        """A redistribution."""
        (source, move, ways), found = node.args, self._share.moves[node]
        assert isinstance(source, fx.Node)
        assert isinstance(move, Move)
        assert isinstance(ways, int)
        body = self._out.stand_in(move, source.meta["val"], ways)
        segment = replace(self._segment(sharded=False, names=[]), redistribution=found)
        (made,) = self._out.add(
            self._chunk,
            segment,
            body,
            (),
            (),
            (),
            [self.numbers[source]],
            [(f"{source.name}'", TensorSpec.of(node.meta["val"]))],
        )
        self.numbers[node] = made

    def _segment(self, *, sharded: bool, names: list[str]) -> Segment:
        it = self._sharding
        number, self._count = self._count, self._count + 1
        return Segment(number, it.axis, it.ways, sharded, {n: it.parameters[n] for n in names})

    def _draws(self, nodes: list[fx.Node]) -> Draws | None:
        """Where the segment with ``nodes`` is in what the chunk draws."""
        drawn = self._share.draws
        mine = [i for i, (node, _) in enumerate(drawn) if node in set(nodes)]
        if not mine:
            return None
        before = [draw for _, draw in drawn[: mine[0]]]
        if mine != list(range(mine[0], mine[-1] + 1)) or None in before:
            raise CaptureError(
                f"region {self._chunk.name} draws random numbers that shards cannot draw alike: "
                "only dropout can be sharded; set it to 0 there, or make the regions smaller"
            )
        earlier = self._chunk.draws or Draws(self._chunk.index)
        return Draws(earlier.chunk, (*earlier.before, *(d for d in before if d is not None)))

    def _leaves(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        if not isinstance(node.meta["val"], Tensor):
            return False
        if node in self._ends and node not in self._updates:
            return True
        return any(user not in inside and user.op != "output" for user in node.users)

    def _constants_of(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """What the segment computes for itself, since it depends on nothing."""
        found: set[fx.Node] = set()
        stack = [a for n in nodes for a in n.all_input_nodes]
        while stack:
            node = stack.pop()
            if node in self._share.constants and node.op == "call_function" and node not in found:
                found.add(node)
                stack += node.all_input_nodes
        return found


def _levels(local: Local) -> dict[fx.Node, int]:
    """How many redistributions lie before each operation: even where devices compute the same, odd
    where they compute on shards."""
    levels: dict[fx.Node, int] = {}
    ends = set(local.results)
    for node in local.graph.nodes:
        if node.op != "call_function" or (node in local.constants and node not in ends):
            continue
        before = [
            levels.get(a, 0) + (a in local.moves and node not in local.moves)
            for a in node.all_input_nodes
        ]
        level = max(before, default=0)
        if node not in local.moves and level % 2 != (node in local.sharded):
            level += 1
        levels[node] = level
    return levels


def _same(one: Sharding | None, other: Sharding) -> bool:
    """Whether a value can go from one chunk to another as it is sharded."""
    return one is not None and (one.axis, one.ways, one.stride) == (
        other.axis,
        other.ways,
        other.stride,
    )


def _resolved(sequence: int | None, ways: int) -> Callable[[Tensor | TensorSpec], Placement]:
    """What a partial sum becomes."""

    def placement(x: Tensor | TensorSpec) -> Placement:
        if sequence is None or not x.dtype.is_floating_point:
            return REPLICATED
        if len(x.shape) <= sequence + 1 or x.shape[sequence] % ways:
            return REPLICATED
        return Shard(sequence)

    return placement


def _body(
    nodes: list[fx.Node],
    parameters: list[fx.Node],
    buffers: list[fx.Node],
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    updates: list[fx.Node],
) -> Body:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for kind, group in (("p", parameters), ("b", buffers), ("x", inputs)):
        for index, node in enumerate(group):
            new[node] = graph.placeholder(f"{kind}{index}")
            new[node].meta["val"] = node.meta["val"]
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[n] for n in (*outputs, *updates)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    sizes = (len(parameters), len(buffers), len(inputs), len(outputs), len(updates))
    return Body(module, *sizes, key=body_key(graph))
