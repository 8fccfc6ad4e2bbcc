"""Builds the graph of one device's share: operations on local values, and redistributions of values
between layouts along the axis.

A value that is gathered, scattered or exchanged all-to-all has the parts in an additional first
dimension while it moves: its producer packs it, its reader unpacks it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import Partial, Shard
from torch.utils import _pytree as pytree

from piper.capture.graphs import inlined
from piper.capture.shard.placements import (
    REPLICATED,
    LocalLayout,
    ShardedSections,
    TensorPlacement,
    is_shard,
    moved_as,
    plain,
)
from piper.capture.shard.shard_axis import ShardAxis
from piper.ir.collectives import Move, move_between, packing, unpacking
from piper.ir.shards import AxisPlacement, Redistribution

aten = torch.ops.aten


class LocalGraph:
    """The graph of one device along ``axis``."""

    def __init__(self, mode: FakeTensorMode, device: torch.device, axis: ShardAxis) -> None:
        self._mode, self._device, self._axis, self._ways = mode, device, axis, axis.ways
        self.graph = fx.Graph()
        self.sharded: set[fx.Node] = set()
        """Operations that devices compute on different shards."""
        self.moves: dict[fx.Node, Redistribution] = {}
        self.constants: set[fx.Node] = set()
        """Values that depend on no parameter and no input."""
        self.rank_node: fx.Node | None = None

    def argument(self, name: str, whole: FakeTensor, placement: LocalLayout) -> fx.Node:
        """An argument of the graph: a shard of ``whole``."""
        local = self.graph.placeholder(name)
        shape = self.shape(whole, placement)
        same = shape == tuple(whole.shape)
        strides = whole.stride() if same else torch.empty(shape, device="meta").stride()
        with self._mode:
            local.meta["val"] = torch.empty_strided(
                shape, strides, dtype=whole.dtype, device=whole.device
            )
        return local

    def rank(self) -> fx.Node:
        """The device's index along the axis."""
        if self.rank_node is None:
            last = self.graph.find_nodes(op="placeholder")[-1]
            with self.graph.inserting_after(last):
                self.rank_node = self.graph.placeholder("rank")
            with self._mode:
                self.rank_node.meta["val"] = torch.empty((), dtype=torch.int64, device=self._device)
            self.constants.add(self.rank_node)
        return self.rank_node

    def call(self, target: Any, args: tuple[Any, ...], sharded: bool, **kwargs: Any) -> fx.Node:
        """An operation on local values; ``sharded`` if devices compute it on different shards."""
        value = self._on_fakes(target, args, kwargs)  # first: if it fails, the graph is unchanged
        local = self.graph.call_function(target, args, kwargs)
        local.meta["val"] = value
        if sharded:
            self.sharded.add(local)
        return local

    def run(self, function: Callable[..., Any], *given: fx.Node, sharded: bool = True) -> Any:
        """The operations that ``function`` calls on local values, and its result."""
        made, result = inlined(self.graph, function, *given)
        if sharded:
            self.sharded.update(made)
        return result

    def placed(self, local: fx.Node, placement: LocalLayout, like: fx.Node | None = None) -> None:
        """Record the placement of ``local``; along earlier axes it is that of ``like``."""
        earlier = placements_of(local if like is None else like)
        others = [p for p in earlier if p.axis != self._axis.name]
        if placement != REPLICATED:
            dim = placement.dim if is_shard(placement) else None
            others.append(AxisPlacement(self._axis.name, dim))
        local.meta["placements"] = tuple(others)

    def redistributed(
        self,
        local: fx.Node,
        made: LocalLayout,
        wanted: TensorPlacement,
        *,
        before: bool,
        after: bool,
    ) -> fx.Node:
        """``local``, redistributed from ``made`` to ``wanted``; ``before`` and ``after`` say
        whether its producer and its reader compute on shards."""
        fixed = local in self.constants or not differentiable(local)
        if made == REPLICATED and not before and after and isinstance(wanted, Shard) and fixed:
            return self.slice(local, wanted.dim)
        packed = local
        if isinstance(wanted, Shard):
            packed = self._pack(local, wanted.dim, before)
        elif not local.meta["val"].is_contiguous():  # its storage is more than its elements
            packed = self._contiguous(local, before)
        change = Redistribution(*_moves(plain(made), wanted, after), f"{made} -> {wanted}")
        args: Any = (packed, change.forward, self._ways)
        moved = self.graph.call_function(_moved, args)
        moved.meta["val"] = self._on_fakes(_moved, args, {})
        self.moves[moved] = change
        self.placed(packed, made, local)
        self.placed(moved, wanted, local)
        if isinstance(made, ShardedSections):
            return self._unpack_sections(moved, made, after)
        if isinstance(made, Shard):
            return self._unpack(moved, made.dim, after)
        return moved

    def slice(self, x: fx.Node, dim: int) -> fx.Node:
        """This device's part of a value that is equal on all devices and has no gradient."""
        size = x.meta["val"].shape[dim] // self._axis.parts
        at = self.positions(self.rank(), size)
        if self._axis.head_tail:
            other = self._constant(aten.rsub.Scalar, self.rank(), self._axis.parts - 1)
            at = self._constant(aten.cat.default, [at, self.positions(other, size)])
        part = self.call(aten.index_select.default, (x, dim, at), True)
        if x in self.constants:
            self.constants.add(part)
        return part

    def part(self, x: fx.Node, placement: Shard | ShardedSections) -> fx.Node:
        """The same along ``placement``, which may have equal sections that are sharded
        separately."""
        dim = placement.dim
        if not isinstance(placement, ShardedSections):
            return self.slice(x, dim)
        shape = list(x.meta["val"].shape)
        apart = [*shape[:dim], len(placement.sections), -1, *shape[dim + 1 :]]
        part = self.slice(self.call(aten.reshape.default, (x, apart), True), dim + 1)
        together = [*shape[:dim], -1, *shape[dim + 1 :]]
        return self.call(aten.reshape.default, (part, together), True)

    def positions(self, part: fx.Node, size: int) -> fx.Node:
        """The positions in the whole of the elements of a part."""
        own = self._constant(aten.arange.default, size, device=self._device)
        first = self._constant(aten.mul.Tensor, part, size)
        return self._constant(aten.add.Tensor, own, first)

    def _constant(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.call(target, args, True, **kwargs)
        self.constants.add(made)
        return made

    def _permuted(self, x: fx.Node, dim: int, order: list[int], sharded: bool) -> fx.Node:
        """``x`` with its parts along ``dim`` in another order."""
        size = x.meta["val"].shape[dim] // len(order)
        parts = self.call(aten.split.Tensor, (x, size, dim), sharded)
        ordered = [self.call(operator.getitem, (parts, part), sharded) for part in order]
        return self.call(aten.cat.default, (ordered, dim), sharded)

    def _pack(self, x: fx.Node, dim: int, sharded: bool) -> fx.Node:
        """``x`` with its shards along ``dim`` in an additional first dimension."""
        if self._axis.head_tail:
            x = self._permuted(x, dim, self._axis.dealt, sharded)
        sizes, order = packing(x.meta["val"].shape, dim, self._ways)
        parts = self.call(aten.reshape.default, (x, sizes), sharded)
        moved = self.call(aten.permute.default, (parts, order), sharded)
        return self._contiguous(moved, sharded)

    def _contiguous(self, x: fx.Node, sharded: bool) -> fx.Node:
        contiguous = torch.contiguous_format
        return self.call(aten.clone.default, (x,), sharded, memory_format=contiguous)

    def _unpack(self, x: fx.Node, dim: int, sharded: bool) -> fx.Node:
        """The inverse of ``_pack``."""
        order, sizes = unpacking(x.meta["val"].shape, dim)
        moved = self.call(aten.permute.default, (x, order), sharded)
        whole = self.call(aten.reshape.default, (moved, sizes), sharded)
        if not self._axis.head_tail:
            return whole
        dealt = self._axis.dealt
        return self._permuted(whole, dim, [dealt.index(i) for i in range(len(dealt))], sharded)

    def _unpack_sections(self, x: fx.Node, packed: ShardedSections, sharded: bool) -> fx.Node:
        """The sections of a fused weight's result, each joined from the parts of all devices."""
        sizes = [n // self._ways for n in packed.sections]
        parts = self.call(aten.split_with_sizes.default, (x, sizes, packed.dim + 1), sharded)
        whole = [
            self._unpack(self.call(operator.getitem, (parts, i), sharded), packed.dim, sharded)
            for i in range(len(sizes))
        ]
        return self.call(aten.cat.default, (whole, packed.dim), sharded)

    def shape(self, whole: Tensor, placement: LocalLayout) -> tuple[int, ...]:
        """The shape of a shard; an uneven dimension is padded."""
        shape = list(whole.shape)
        if is_shard(placement):
            shape[placement.dim] = self._axis.shard(shape[placement.dim])
        return tuple(shape)

    def _on_fakes(self, target: Any, args: Any, kwargs: Any) -> Any:
        fakes = pytree.tree_map_only(fx.Node, lambda x: x.meta["val"], (args, dict(kwargs)))
        with self._mode, torch.no_grad():
            return target(*fakes[0], **fakes[1])


def _moves(made: TensorPlacement, wanted: TensorPlacement, sharded: bool) -> tuple[Move, Move]:
    """The move of a value, and of its gradient back. If the reader computes on shards, its gradient
    of a replicated value is a partial sum."""
    back = Partial() if sharded and wanted == REPLICATED else wanted
    taken = REPLICATED if isinstance(made, Partial) else made
    return (
        move_between(moved_as(made), moved_as(wanted)),
        move_between(moved_as(back), moved_as(taken)),
    )


def _moved(x: Tensor, move: Move, ways: int) -> Tensor:
    """A tensor of the shape that a move makes; collectives provide the contents at run time."""
    if move is Move.ALL_GATHER:
        return x.unsqueeze(0).expand(ways, *x.shape).clone()
    if move in (Move.REDUCE_SCATTER, Move.SELECT):
        return x.select(0, 0).clone()
    return x.clone(memory_format=torch.contiguous_format)


def placements_of(local: fx.Node) -> tuple[AxisPlacement, ...]:
    """The placements of a local value along the axes where it is not replicated."""
    placements: tuple[AxisPlacement, ...] = local.meta.get("placements", ())
    return placements


def stand_in(move: Move, ways: int) -> Callable[[Tensor], Tensor]:
    """A function with the shapes of a redistribution, for autograd."""
    return lambda x: _moved(x, move, ways)


def differentiable(local: fx.Node) -> bool:
    """Whether a value can have a gradient."""
    value = local.meta["val"]
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
