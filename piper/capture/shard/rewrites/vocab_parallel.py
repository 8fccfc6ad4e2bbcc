"""Vocabulary parallelism: embeddings with sharded rows, and cross entropy of logits with sharded
classes or rows. A device never has more than its own logits.

    embedding of a sharded vocabulary      rows of other devices are zero: a partial sum
    cross entropy, classes sharded         for each row, max and sum of exponentials over all shards
    cross entropy, rows sharded            sum of losses and number of targets over all shards
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.distributed.tensor import Partial, Shard

from piper.capture.shard.local_graph import LocalLayout
from piper.capture.shard.placements import REPLICATED
from piper.capture.shard.rewrites.fused_weights import ShardedSections
from piper.capture.shard.shard_axis import ShardAxis
from piper.ir.collectives import Placement

aten = torch.ops.aten


class Emitter(Protocol):
    """The interface of the share's graph for rewrites."""

    axis: ShardAxis

    def call(self, target: Any, *args: Any, sharded: bool = True) -> fx.Node:
        """An operation on local values."""
        ...

    def rank(self) -> fx.Node:
        """The device's index along the axis."""
        ...

    def positions(self, size: int) -> fx.Node:
        """The positions in the whole of the ``size`` elements of this device's part."""
        ...

    def moved(
        self, local: fx.Node, made: Placement, wanted: Placement, *, sharded: bool
    ) -> fx.Node:
        """A local value in another layout, for a reader that computes on shards or not."""
        ...


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The result of a rewritten operation, and its placement."""

    local: fx.Node
    placement: LocalLayout


def on_shards(
    node: fx.Node, placed: Mapping[fx.Node, Any], local: Mapping[fx.Node, fx.Node], emit: Emitter
) -> Rewrite | None:
    """The rewrite of ``node`` for inputs placed as ``placed``, if there is one."""
    if node.target is aten.embedding.default:
        weight, indices = node.args[:2]
        assert isinstance(weight, fx.Node)
        assert isinstance(indices, fx.Node)
        by_frequency = len(node.args) > 3 and node.args[3]  # no shard knows the frequency
        if placed[weight] == Shard(0) and placed[indices] == REPLICATED and not by_frequency:
            padding = node.args[2] if len(node.args) > 2 else -1
            rows = weight.meta["val"].shape[0]
            return _embedding(local[weight], local[indices], rows, int(padding), emit)  # type: ignore[arg-type]
    if node.target is aten.cross_entropy_loss.default:
        loss = _Loss.of(node)
        if loss is None:
            return None
        logits, target = placed[loss.logits], placed[loss.target]
        if logits == Shard(1) and target == REPLICATED and not emit.axis.head_tail:
            return _classes(loss, local[loss.logits], local[loss.target], emit)
        if logits == target and (logits == Shard(0) or isinstance(logits, ShardedSections)):
            return _rows(loss, logits, local[loss.logits], local[loss.target], emit)
    return None


def wanted_target(node: fx.Node, placed: Mapping[fx.Node, Any]) -> dict[fx.Node, LocalLayout]:
    """The placements of inputs that the rewrite of ``node`` needs and they do not have."""
    loss = _Loss.of(node) if node.target is aten.cross_entropy_loss.default else None
    if loss is None:
        return {}
    logits, target = placed[loss.logits], placed[loss.target]
    if isinstance(logits, ShardedSections) and logits.dim == 0:
        return {loss.target: logits}
    elsewhere = target == REPLICATED or isinstance(target, ShardedSections)
    return {loss.target: Shard(0)} if logits == Shard(0) and elsewhere else {}


def _embedding(
    weight: fx.Node, indices: fx.Node, rows: int, padding: int, emit: Emitter
) -> Rewrite:
    here, outside = _own(indices, weight.meta["val"].shape[0], rows, emit)
    embedded = emit.call(aten.embedding.default, weight, here)
    if padding >= 0:  # its row is read and gets no gradient
        pads = emit.call(aten.unsqueeze.default, emit.call(aten.eq.Scalar, indices, padding), -1)
        embedded = emit.call(
            aten.where.self, pads, emit.call(aten.detach.default, embedded), embedded
        )
    mask = emit.call(aten.unsqueeze.default, outside, -1)
    return Rewrite(emit.call(aten.masked_fill.Scalar, embedded, mask, 0.0), Partial())


def _own(
    indices: fx.Node, size: int, whole: int, emit: Emitter, ignored: int | None = None
) -> tuple[fx.Node, fx.Node]:
    """Indices into this device's ``size`` of the ``whole`` rows, 0 for rows of other devices, and a
    mask of indices outside this device's rows. An index that no device has stays for the operation
    to refuse, unless it is ``ignored``."""
    first = emit.call(aten.mul.Tensor, emit.rank(), size)
    here = emit.call(aten.sub.Tensor, indices, first)
    below = emit.call(aten.lt.Scalar, here, 0)
    outside = emit.call(aten.logical_or.default, below, emit.call(aten.ge.Scalar, here, size))
    known = emit.call(
        aten.logical_and.default,
        emit.call(aten.ge.Scalar, indices, 0),
        emit.call(aten.lt.Scalar, indices, whole),
    )
    if ignored is not None:
        known = emit.call(
            aten.logical_or.default, known, emit.call(aten.eq.Scalar, indices, ignored)
        )
    elsewhere = emit.call(aten.logical_and.default, outside, known)
    return emit.call(aten.masked_fill.Scalar, here, elsewhere, 0), outside


@dataclass(frozen=True, slots=True)
class _Loss:
    """A cross entropy without class weights and label smoothing."""

    logits: fx.Node
    target: fx.Node
    reduction: int
    ignored: int

    @staticmethod
    def of(node: fx.Node) -> _Loss | None:
        defaults: list[Any] = [None, None, None, 1, -100, 0.0]
        given = [*node.args, *defaults[len(node.args) :]]
        names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
        logits, target, weight, reduction, ignored, smoothing = (
            node.kwargs.get(name, value) for name, value in zip(names, given, strict=True)
        )
        assert isinstance(logits, fx.Node)
        assert isinstance(target, fx.Node)
        indices = not target.meta["val"].dtype.is_floating_point
        plain = weight is None and smoothing == 0.0 and indices
        if not plain or len(logits.meta["val"].shape) != 2:
            return None
        return _Loss(logits, target, int(reduction), int(ignored))


_MEAN, _SUM = 1, 2


def _classes(loss: _Loss, x: fx.Node, target: fx.Node, emit: Emitter) -> Rewrite:
    dtype = x.meta["val"].dtype
    if dtype in (torch.bfloat16, torch.float16):
        x = emit.call(aten.to.dtype, x, torch.float32)
    size, whole = x.meta["val"].shape[1], loss.logits.meta["val"].shape[1]
    if size * emit.axis.ways != whole:
        x = _without_padding(x, size, whole, emit)
    largest = emit.call(aten.amax.default, emit.call(aten.detach.default, x), [1])
    mine = emit.call(aten.unsqueeze.default, largest, 0)
    everywhere = emit.moved(mine, Shard(0), REPLICATED, sharded=True)  # [ways, rows]
    shift = emit.call(aten.amax.default, everywhere, [0])
    shifted = emit.call(aten.sub.Tensor, x, emit.call(aten.unsqueeze.default, shift, 1))
    exponentials = emit.call(aten.sum.dim_IntList, emit.call(aten.exp.default, shifted), [1])
    here, outside = _own(target, size, whole, emit, loss.ignored)
    picked = emit.call(aten.gather.default, shifted, 1, emit.call(aten.unsqueeze.default, here, 1))
    picked = emit.call(aten.squeeze.dim, picked, 1)
    picked = emit.call(aten.masked_fill.Scalar, picked, outside, 0.0)
    total = emit.moved(exponentials, Partial(), REPLICATED, sharded=False)
    own = emit.moved(picked, Partial(), REPLICATED, sharded=False)

    def call(target: Any, *args: Any) -> fx.Node:
        return emit.call(target, *args, sharded=False)

    losses = call(aten.sub.Tensor, call(aten.log.default, total), own)
    ignored = call(aten.eq.Scalar, target, loss.ignored)
    losses = call(aten.masked_fill.Scalar, losses, ignored, 0.0)
    if loss.reduction in (_MEAN, _SUM):
        losses = call(aten.sum.default, losses)
    if loss.reduction == _MEAN:
        losses = call(aten.div.Tensor, losses, _count(ignored, losses, call))
    return Rewrite(_cast(losses, dtype, call), REPLICATED)


def _without_padding(x: fx.Node, size: int, whole: int, emit: Emitter) -> fx.Node:
    """Logits with -inf for the padding after the ``whole`` classes."""
    after = emit.call(aten.ge.Scalar, emit.positions(size), whole)
    return emit.call(aten.masked_fill.Scalar, x, after, float("-inf"))


def _rows(loss: _Loss, placed: LocalLayout, x: fx.Node, target: fx.Node, emit: Emitter) -> Rewrite:
    if loss.reduction not in (_MEAN, _SUM):
        losses = emit.call(aten.cross_entropy_loss.default, x, target, None, 0, loss.ignored)
        return Rewrite(losses, placed)
    dtype = x.meta["val"].dtype
    if dtype in (torch.bfloat16, torch.float16):  # sums and counts of many rows need float32
        each = emit.call(aten.cross_entropy_loss.default, x, target, None, 0, loss.ignored)
        total = emit.call(aten.sum.default, emit.call(aten.to.dtype, each, torch.float32))
    else:
        total = emit.call(aten.cross_entropy_loss.default, x, target, None, _SUM, loss.ignored)
        if loss.reduction == _SUM:
            return Rewrite(total, Partial())
    losses = emit.moved(total, Partial(), REPLICATED, sharded=False)

    def call(target: Any, *args: Any) -> fx.Node:
        return emit.call(target, *args, sharded=False)

    if loss.reduction == _MEAN:
        ignored = emit.call(aten.eq.Scalar, target, loss.ignored)
        count = _count(ignored, total, emit.call)
        targets = emit.moved(count, Partial(), REPLICATED, sharded=False)
        losses = call(aten.div.Tensor, losses, targets)
    return Rewrite(_cast(losses, dtype, call), REPLICATED)


def _count(ignored: fx.Node, like: fx.Node, call: Any) -> fx.Node:
    """The number of targets that are not ignored, in the dtype of ``like``."""
    counted = call(aten.sum.default, call(aten.logical_not.default, ignored))
    return _cast(counted, like.meta["val"].dtype, call)


def _cast(x: fx.Node, dtype: torch.dtype, call: Any) -> fx.Node:
    return x if x.meta["val"].dtype is dtype else call(aten.to.dtype, x, dtype)
