"""Vocabulary parallelism: embeddings with sharded rows, and cross entropy of logits with sharded
classes or rows. A device never has more than its own logits.

    embedding of a sharded vocabulary      rows of other devices are zero: a partial sum
    cross entropy, classes sharded         for each row, max and sum of exponentials over all shards
    cross entropy, rows sharded            sum of losses and number of targets over all shards
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Shard

from piper.capture.graphs import arguments
from piper.capture.shard.placements import REPLICATED, ShardedSections
from piper.capture.shard.rewrites.table import Form, Share, rewrite
from piper.capture.shard.shard_axis import ShardAxis

aten = torch.ops.aten


@rewrite(aten.embedding.default)
def embedding(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """The form for sharded rows of the weight."""
    weight, indices, padding, by_frequency, _ = arguments(node).values()
    if placed[weight] != Shard(0) or placed[indices] != REPLICATED or by_frequency:
        return None  # no shard knows the frequency
    return Form(placed, Partial(), partial(_embedding, weight, indices, padding))


def _embedding(weight: fx.Node, indices: fx.Node, padding: int, share: Share) -> fx.Node:
    rows, which = share.read(weight), share.read(indices)
    here, outside = _own(which, rows.meta["val"].shape[0], weight.meta["val"].shape[0], share)
    embedded = share.call(aten.embedding.default, rows, here)
    if padding >= 0:  # its row is read and gets no gradient
        pads = share.call(aten.unsqueeze.default, share.call(aten.eq.Scalar, which, padding), -1)
        kept = share.call(aten.detach.default, embedded)
        embedded = share.call(aten.where.self, pads, kept, embedded)
    mask = share.call(aten.unsqueeze.default, outside, -1)
    return share.call(aten.masked_fill.Scalar, embedded, mask, 0.0)


def _own(
    indices: fx.Node, size: int, whole: int, share: Share, ignored: int | None = None
) -> tuple[fx.Node, fx.Node]:
    """Indices into this device's ``size`` of the ``whole`` rows, 0 for rows of other devices, and a
    mask of indices outside this device's rows. An index that no device has stays for the operation
    to refuse, unless it is ``ignored``."""
    first = share.call(aten.mul.Tensor, share.rank(), size)
    here = share.call(aten.sub.Tensor, indices, first)
    below = share.call(aten.lt.Scalar, here, 0)
    outside = share.call(aten.logical_or.default, below, share.call(aten.ge.Scalar, here, size))
    known = share.call(
        aten.logical_and.default,
        share.call(aten.ge.Scalar, indices, 0),
        share.call(aten.lt.Scalar, indices, whole),
    )
    if ignored is not None:
        known = share.call(
            aten.logical_or.default, known, share.call(aten.eq.Scalar, indices, ignored)
        )
    elsewhere = share.call(aten.logical_and.default, outside, known)
    return share.call(aten.masked_fill.Scalar, here, elsewhere, 0), outside


@dataclass(frozen=True, slots=True)
class _Loss:
    """A cross entropy without class weights and label smoothing."""

    logits: fx.Node
    target: fx.Node
    reduction: int
    ignored: int

    @property
    def in_half(self) -> bool:
        return self.logits.meta["val"].dtype in (torch.bfloat16, torch.float16)

    @staticmethod
    def of(node: fx.Node) -> _Loss | None:
        logits, target, weight, reduction, ignored, smoothing = arguments(node).values()
        indices = not target.meta["val"].dtype.is_floating_point
        plain = weight is None and smoothing == 0.0 and indices
        if not plain or len(logits.meta["val"].shape) != 2:
            return None
        return _Loss(logits, target, int(reduction), int(ignored))


_MEAN, _SUM = 1, 2


@rewrite(aten.cross_entropy_loss.default)
def cross_entropy(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """The form for sharded classes or rows. Targets are read as logits are made."""
    loss = _Loss.of(node)
    if loss is None:
        return None
    logits, target = placed[loss.logits], placed[loss.target]
    if logits == Shard(1) and target == REPLICATED and not axis.head_tail:
        return Form(placed, REPLICATED, partial(_classes, loss))
    sections = isinstance(logits, ShardedSections) and logits.dim == 0
    known = target in (REPLICATED, Shard(0)) or isinstance(target, ShardedSections)
    if not sections and not (logits == Shard(0) and known):
        return None
    made = logits if loss.reduction not in (_MEAN, _SUM) else REPLICATED
    if loss.reduction == _SUM and not loss.in_half:
        made = Partial()
    return Form({loss.logits: logits, loss.target: logits}, made, partial(_rows, loss))


def _classes(loss: _Loss, share: Share) -> fx.Node:
    x, target = share.read(loss.logits), share.read(loss.target)
    dtype = x.meta["val"].dtype
    if loss.in_half:
        x = share.call(aten.to.dtype, x, torch.float32)
    size, whole = x.meta["val"].shape[1], loss.logits.meta["val"].shape[1]
    if size * share.axis.ways != whole:
        x = _without_padding(x, size, whole, share)
    largest = share.call(aten.amax.default, share.call(aten.detach.default, x), [1])
    mine = share.call(aten.unsqueeze.default, largest, 0)
    everywhere = share.moved(mine, Shard(0), REPLICATED, sharded=True)  # [ways, rows]
    shift = share.call(aten.amax.default, everywhere, [0])
    shifted = share.call(aten.sub.Tensor, x, share.call(aten.unsqueeze.default, shift, 1))
    exponentials = share.call(aten.sum.dim_IntList, share.call(aten.exp.default, shifted), [1])
    here, outside = _own(target, size, whole, share, loss.ignored)
    index = share.call(aten.unsqueeze.default, here, 1)
    picked = share.call(aten.gather.default, shifted, 1, index)
    picked = share.call(aten.squeeze.dim, picked, 1)
    picked = share.call(aten.masked_fill.Scalar, picked, outside, 0.0)
    total = share.moved(exponentials, Partial(), REPLICATED, sharded=False)
    own = share.moved(picked, Partial(), REPLICATED, sharded=False)
    call = partial(share.call, sharded=False)
    losses = call(aten.sub.Tensor, call(aten.log.default, total), own)
    ignored = call(aten.eq.Scalar, target, loss.ignored)
    losses = call(aten.masked_fill.Scalar, losses, ignored, 0.0)
    if loss.reduction in (_MEAN, _SUM):
        losses = call(aten.sum.default, losses)
    if loss.reduction == _MEAN:
        losses = call(aten.div.Tensor, losses, _count(ignored, losses, call))
    return _cast(losses, dtype, call)


def _without_padding(x: fx.Node, size: int, whole: int, share: Share) -> fx.Node:
    """Logits with -inf for the padding after the ``whole`` classes."""
    after = share.call(aten.ge.Scalar, share.positions(size), whole)
    return share.call(aten.masked_fill.Scalar, x, after, float("-inf"))


def _rows(loss: _Loss, share: Share) -> fx.Node:
    x, target = share.read(loss.logits), share.read(loss.target)
    if loss.reduction not in (_MEAN, _SUM):
        return share.call(aten.cross_entropy_loss.default, x, target, None, 0, loss.ignored)
    dtype = x.meta["val"].dtype
    if loss.in_half:  # sums and counts of many rows need float32
        each = share.call(aten.cross_entropy_loss.default, x, target, None, 0, loss.ignored)
        total = share.call(aten.sum.default, share.call(aten.to.dtype, each, torch.float32))
    else:
        total = share.call(aten.cross_entropy_loss.default, x, target, None, _SUM, loss.ignored)
        if loss.reduction == _SUM:
            return total
    losses = share.moved(total, Partial(), REPLICATED, sharded=False)
    call = partial(share.call, sharded=False)
    if loss.reduction == _MEAN:
        ignored = share.call(aten.eq.Scalar, target, loss.ignored)
        count = _count(ignored, total, share.call)
        targets = share.moved(count, Partial(), REPLICATED, sharded=False)
        losses = call(aten.div.Tensor, losses, targets)
    return _cast(losses, dtype, call)


def _count(ignored: fx.Node, like: fx.Node, call: Any) -> fx.Node:
    """The number of targets that are not ignored, in the dtype of ``like``."""
    counted = call(aten.sum.default, call(aten.logical_not.default, ignored))
    return _cast(counted, like.meta["val"].dtype, call)


def _cast(x: fx.Node, dtype: torch.dtype, call: Any) -> fx.Node:
    return x if x.meta["val"].dtype is dtype else call(aten.to.dtype, x, dtype)
