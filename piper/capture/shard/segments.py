"""Tensor parallelism on a cut model: replaces chunks that are sharded along an axis by their
segments, at the shapes of one device's share.

    layer ─▶      norm ─▶ [R -> R] ─▶ attention ─▶ [P -> R] ─▶ add, norm ─▶ [R -> R] ─▶ mlp ─▶ ...

A segment is a chunk like any other. So is a redistribution, until lowering turns it into
collectives: order, overlap, memory, remat and BI/BW do not depend on tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard
from torch.fx.experimental.proxy_tensor import make_fx

from piper.base.errors import CaptureError
from piper.capture.chunk.chunks import Body, Chunk, ChunkValue, Cut
from piper.capture.chunk.cut import body_key
from piper.capture.chunk.expert_regions import sorted_rows
from piper.capture.graphs import module_of
from piper.capture.shard.local_chunks import LocalChunks, Sharding
from piper.capture.shard.local_graph import placements_of, stand_in
from piper.capture.shard.placement_search import Placing
from piper.capture.shard.placements import (
    REPLICATED,
    LocalLayout,
    Routed,
    RowRole,
    ShardedSections,
    TensorPlacement,
)
from piper.capture.shard.propagate import Local, propagate
from piper.capture.shard.rewrites.routing import UnroutedError
from piper.capture.shard.shard_axis import ShardAxis
from piper.capture.shard.sharding_rules import Rules
from piper.ir.collectives import Move
from piper.ir.shards import AxisPlacement, Draws
from piper.ir.tensors import TensorSpec


def segmented(cut: Cut, shardings: Mapping[int, Sequence[Sharding]]) -> Cut:
    """``cut`` with the chunks in ``shardings`` replaced by their segments, one axis after
    another."""
    try:
        return _segmented(cut, shardings)
    except UnroutedError:
        others = {i: [s for s in row if not s.routed] for i, row in shardings.items()}
        return _segmented(cut, others)


def _segmented(cut: Cut, shardings: Mapping[int, Sequence[Sharding]]) -> Cut:
    axes = list(dict.fromkeys(s.axis for row in shardings.values() for s in row))
    origin = list(range(len(cut.chunks)))
    for axis in axes:
        rows = {i: shardings.get(of, ()) for i, of in enumerate(origin)}
        segmenter = _Segmenter(
            cut, {i: s for i, row in rows.items() for s in row if s.axis == axis}
        )
        cut = segmenter.cut()
        origin = [origin[i] for i in segmenter.origin]
    return replace(cut, origin=tuple(origin))


class _Segmenter:
    def __init__(self, cut: Cut, shardings: Mapping[int, Sharding]) -> None:
        self._cut = cut
        self._shardings = {i: s for i, s in shardings.items() if not s.routed}
        self._routed = {i: s for i, s in shardings.items() if s.routed}
        """Experts that get the rows of each device in an order of their own."""
        axes = {_axis(s) for s in shardings.values()}
        self._rules = {axis: Rules(axis) for axis in axes}
        self._locals: dict[object, Local] = {}
        self._stand_ins: dict[object, Body] = {}
        self._chunks: list[Chunk] = []
        self.origin: list[int] = []
        """For each new chunk, the index of the old chunk it is a segment of."""
        self._values: list[ChunkValue] = []
        self._numbers: dict[int, int] = {}
        """By index of an old value, its new index."""
        self._edges: dict[int, LocalLayout] = {}
        """By index of an old value, its placement along the axis."""

    def cut(self) -> Cut:
        old = self._cut
        for value in old.values:
            if value.producer is None:
                self._numbers[value.index] = self._value(value.name, value.spec, None)
                self._edges[value.index] = REPLICATED
        for chunk in old.chunks:
            sharding = self._shardings.get(chunk.index)
            if sharding is None:
                self._keep(chunk, self._routed.get(chunk.index))
            else:
                self._segment(chunk, sharding)
        return old.renumbered(self._chunks, self._values, self._numbers.__getitem__)

    @cached_property
    def _in_parts(self) -> frozenset[int]:
        """The values whose dimension 0 indexes the parts that a redistribution sends."""
        values: set[int] = set()
        for chunk in self._cut.chunks:
            for segment in chunk.segments:
                move = segment.redistribution and segment.redistribution.forward
                if move in (Move.ALL_TO_ALL, Move.REDUCE_SCATTER, Move.SELECT):
                    values.update(chunk.inputs)
        return frozenset(values)

    def _wanted(self, value: int, sharding: Sharding) -> TensorPlacement | None:
        """The placement that a value must have along the axis of ``sharding``; None, open, if all
        its readers are sharded in the same way."""
        if value in (self._cut.loss, self._cut.count, *self._cut.outputs):
            return REPLICATED
        readers = [
            c.index for c in self._cut.chunks if value in c.inputs and c.index not in self._routed
        ]
        same = all(_same(self._shardings.get(i), sharding) for i in readers)
        return None if same else REPLICATED

    def _split(self, value: int, sharding: Sharding) -> int | None:
        """The dimension along which a tensor of the batch is sharded where it is read."""
        dim, tensor = sharding.split, self._cut.values[value]
        if dim is None or tensor.producer is not None:
            return None
        batch = [v.spec.shape for v in self._cut.values if v.producer is None]
        length = next((shape[dim] for shape in batch if len(shape) > dim), None)
        if len(tensor.spec.shape) <= dim or tensor.spec.shape[dim] != length:
            return None
        axis = _axis(sharding)
        if length % axis.parts:
            raise CaptureError(
                f"{tensor.name} has a sequence of {length}, which {axis.ways} devices along "
                f"{axis.name} cannot share evenly: pad it to a multiple of {axis.parts}"
            )
        return dim

    def _value(
        self,
        name: str,
        spec: TensorSpec,
        producer: int | None,
        placements: tuple[AxisPlacement, ...] = (),
    ) -> int:
        index = len(self._values)
        self._values.append(ChunkValue(index, name, spec, producer, placements))
        return index

    def _keep(self, chunk: Chunk, routed: Sharding | None) -> None:
        index = len(self._chunks)
        made = REPLICATED if routed is None else self._order(chunk)
        self.origin.append(chunk.index)
        for value in chunk.outputs:
            old = self._cut.values[value]
            spec, placements = old.spec, old.placements
            if routed is not None:
                shape = (spec.shape[0] // routed.ways, *spec.shape[1:])
                spec = TensorSpec.of(torch.empty(shape, dtype=spec.dtype, device="meta"))
                placements = (*placements, AxisPlacement(routed.axis, 0))
            self._numbers[value] = self._value(old.name, spec, index, placements)
            self._edges[value] = made
        self._chunks.append(
            replace(
                chunk,
                index=index,
                inputs=tuple(self._numbers[v] for v in chunk.inputs),
                outputs=tuple(self._numbers[v] for v in chunk.outputs),
                draws=chunk.draws or Draws(chunk.index),
            )
        )

    def _order(self, chunk: Chunk) -> Routed:
        """The placement of the rows that experts make: that of the rows that they read."""
        sorting = sorted_rows(chunk.body)
        assert sorting is not None
        given = [self._edges[value] for value in chunk.inputs]
        counts = given.pop(sorting.counts)
        rows = given[0]
        if not isinstance(rows, Routed) or rows != rows.like_rows or set(given) != {rows}:
            raise UnroutedError
        if counts != replace(rows, role=RowRole.COUNTS):
            raise UnroutedError
        return rows

    def _segment(self, chunk: Chunk, sharding: Sharding) -> None:
        local = self._local(chunk, sharding)
        parts = LocalChunks(chunk, sharding, local)
        numbers = dict(zip(parts.inputs, (self._numbers[v] for v in chunk.inputs), strict=True))
        gathered = (*chunk.gathered, *local.gathered)
        for part in parts:
            index = len(self._chunks)
            self.origin.append(chunk.index)
            for node in part.outputs:
                name, spec = part.name(node), TensorSpec.of(node.meta["val"])
                numbers[node] = self._value(name, spec, index, placements_of(node))
            self._chunks.append(
                Chunk(
                    index=index,
                    tags=chunk.tags,
                    parameters=part.parameters,
                    buffers=part.buffers,
                    inputs=tuple(numbers[node] for node in part.inputs),
                    outputs=tuple(numbers[node] for node in part.outputs),
                    updates=part.updates,
                    body=part.body or self._stand_in(part.outputs[0], sharding.ways),
                    segments=(*chunk.segments, part.segment),
                    draws=part.draws,
                    gathered=gathered if part.body is not None else (),
                )
            )
            gathered = gathered if part.body is None else ()  # for the first that computes
        ends = zip(chunk.outputs, local.results, local.placements, strict=False)
        orders = self._orders(chunk)
        for value, node, placement in ends:
            self._numbers[value] = numbers[node]
            self._edges[value] = placement
            if isinstance(placement, Routed):
                order = placement.order
                known = orders[order] if isinstance(order, int) else (chunk.index, order)
                self._edges[value] = replace(placement, order=known)

    def _orders(self, chunk: Chunk) -> list[object]:
        """The orders of rows that a chunk reads, which it knows by their number here."""
        edges = (self._edges[value] for value in chunk.inputs)
        return list(dict.fromkeys(x.order for x in edges if isinstance(x, Routed)))

    def _local(self, chunk: Chunk, sharding: Sharding) -> Local:
        given: list[LocalLayout] = []
        for name in chunk.parameters:
            shard = sharding.parameters.get(name)
            if shard is None:
                given.append(REPLICATED)
            elif shard.sections:
                given.append(ShardedSections(shard.dim, shard.sections))
            else:
                given.append(Shard(shard.dim))
        given += [REPLICATED] * len(chunk.buffers)
        orders = self._orders(chunk)
        for edge in (self._edges[value] for value in chunk.inputs):
            if isinstance(edge, Routed):
                edge = replace(edge, order=orders.index(edge.order))
            given.append(edge)
        split = tuple(self._split(value, sharding) for value in chunk.inputs)
        wanted: list[TensorPlacement | None] = [self._wanted(v, sharding) for v in chunk.outputs]
        wanted += [REPLICATED] * len(chunk.updates)
        local = self._propagated(chunk, sharding, given, wanted, split)
        kept = [
            self._beside_parts(value, placement, _axis(sharding).parts) or want
            for value, placement, want in zip(chunk.outputs, local.placements, wanted, strict=False)
        ]
        if kept != wanted[: len(kept)]:
            wanted[: len(kept)] = kept
            local = self._propagated(chunk, sharding, given, wanted, split)
        return local

    def _beside_parts(
        self, value: int, placement: LocalLayout, parts: int
    ) -> TensorPlacement | None:
        """Another placement for a value that is sharded along dimension 0, if this indexes the
        parts that a redistribution along another axis sends: every device has all parts."""
        if placement != Shard(0) or value not in self._in_parts:
            return None
        shape = self._cut.values[value].spec.shape
        return next(
            (Shard(d) for d, size in enumerate(shape) if d and size % parts == 0), REPLICATED
        )

    def _propagated(
        self,
        chunk: Chunk,
        sharding: Sharding,
        given: list[LocalLayout],
        wanted: list[TensorPlacement | None],
        split: tuple[int | None, ...],
    ) -> Local:
        axis = _axis(sharding)
        key = chunk.body.key, axis, sharding.sequence, tuple(given), tuple(wanted), split
        if key not in self._locals:
            resolved = _resolved(sharding.sequence, sharding.ways)
            placing = Placing(self._rules[axis], axis, resolved, routing=bool(self._routed))
            self._locals[key] = propagate(chunk.body, placing, given, wanted, split)
        return self._locals[key]

    def _stand_in(self, node: fx.Node, ways: int) -> Body:
        """A body with the shapes of a redistribution, for autograd."""
        source, move, _ = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(move, Move)
        fake = source.meta["val"]
        key = move, TensorSpec.of(fake), tuple(fake.stride()), ways
        if key not in self._stand_ins:
            graph = make_fx(stand_in(move, ways))(fake).graph
            output = graph.output_node()
            output.args = ((output.args[0],),)
            self._stand_ins[key] = Body(module_of(graph), 0, 0, 1, 1, 0, body_key(graph))
        return self._stand_ins[key]


def _same(one: Sharding | None, other: Sharding) -> bool:
    """Whether a sharded value can go from one chunk to the other without a redistribution."""
    return one is not None and (_axis(one), one.stride) == (_axis(other), other.stride)


def _axis(sharding: Sharding) -> ShardAxis:
    return ShardAxis(sharding.axis, sharding.ways, sharding.context)


def _resolved(sequence: int | None, ways: int) -> Callable[[Tensor | TensorSpec], TensorPlacement]:
    """The placement of a reduced partial sum: sharded along ``sequence`` if possible."""

    def placement(x: Tensor | TensorSpec) -> TensorPlacement:
        if sequence is None or not x.dtype.is_floating_point:
            return REPLICATED
        if len(x.shape) <= sequence + 1 or x.shape[sequence] % ways:
            return REPLICATED
        return Shard(sequence)

    return placement
