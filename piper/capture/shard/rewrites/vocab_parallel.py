"""Vocabulary parallelism: embeddings with sharded rows, and cross entropy of logits with sharded
classes or rows. A device never has more than its own logits.

    embedding of a sharded vocabulary      rows of other devices are zero: a partial sum
    cross entropy, classes sharded         for each row, max and sum of exponentials over all shards
    cross entropy, rows sharded            sum of losses and number of targets over all shards
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
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
    rows, whole = share.read(weight), weight.meta["val"].shape[0]

    def embedded(rows: Tensor, which: Tensor, rank: Tensor) -> Tensor:
        here, outside = _own(which, rank, rows.shape[0], whole)
        made: Tensor = aten.embedding.default(rows, here)
        if padding >= 0:  # its row is read and gets no gradient
            made = torch.where((which == padding).unsqueeze(-1), made.detach(), made)
        return made.masked_fill(outside.unsqueeze(-1), 0.0)

    return share.run(embedded, rows, share.read(indices), share.rank())


def _own(
    indices: Tensor, rank: Tensor, size: int, whole: int, ignored: int | None = None
) -> tuple[Tensor, Tensor]:
    """Indices into this device's ``size`` of the ``whole`` rows, 0 for rows of other devices, and a
    mask of indices outside this device's rows. An index that no device has stays for the operation
    to refuse, unless it is ``ignored``."""
    here = indices - rank * size
    outside = torch.logical_or(here < 0, here >= size)
    known = torch.logical_and(indices >= 0, indices < whole)
    if ignored is not None:
        known = torch.logical_or(known, indices == ignored)
    return here.masked_fill(torch.logical_and(outside, known), 0), outside


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
    if size * share.axis.ways != whole:  # the padding after all classes
        places = share.positions(size)
        x = share.run(lambda x, at: x.masked_fill(at >= whole, -math.inf), x, places)
    largest = share.run(lambda x: x.detach().amax([1]).unsqueeze(0), x)
    everywhere = share.moved(largest, Shard(0), REPLICATED, sharded=True)  # [ways, rows]

    def of_own(x: Tensor, largest: Tensor, target: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        shifted = x - largest.amax([0]).unsqueeze(1)
        exponentials = shifted.exp().sum([1])
        here, outside = _own(target, rank, size, whole, loss.ignored)
        picked = shifted.gather(1, here.unsqueeze(1)).squeeze(1)
        return exponentials, picked.masked_fill(outside, 0.0)

    def of_all(total: Tensor, picked: Tensor, target: Tensor) -> Tensor:
        losses, ignored = total.log() - picked, target == loss.ignored
        losses = losses.masked_fill(ignored, 0.0)
        if loss.reduction in (_MEAN, _SUM):
            losses = losses.sum()
        if loss.reduction == _MEAN:
            losses = losses / _count(ignored, losses.dtype)
        return _cast(losses, dtype)

    own = share.run(of_own, x, everywhere, target, share.rank())
    both = (share.moved(part, Partial(), REPLICATED, sharded=False) for part in own)
    return share.run(of_all, *both, target, sharded=False)


def _rows(loss: _Loss, share: Share) -> fx.Node:
    x, target = share.read(loss.logits), share.read(loss.target)
    entropy = aten.cross_entropy_loss.default
    if loss.reduction not in (_MEAN, _SUM):
        return share.call(entropy, x, target, None, 0, loss.ignored)
    dtype = x.meta["val"].dtype

    def summed(x: Tensor, target: Tensor) -> Tensor:
        if not loss.in_half:
            return entropy(x, target, None, _SUM, loss.ignored)
        # sums and counts of many rows need float32
        return entropy(x, target, None, 0, loss.ignored).to(torch.float32).sum()

    total = share.run(summed, x, target)
    if loss.reduction == _SUM and not loss.in_half:
        return total
    losses = share.moved(total, Partial(), REPLICATED, sharded=False)
    if loss.reduction == _MEAN:
        kind = total.meta["val"].dtype
        count = share.run(lambda target: _count(target == loss.ignored, kind), target)
        targets = share.moved(count, Partial(), REPLICATED, sharded=False)
        losses = share.call(aten.div.Tensor, losses, targets, sharded=False)
    if losses.meta["val"].dtype is dtype:
        return losses
    return share.call(aten.to.dtype, losses, dtype, sharded=False)


def _count(ignored: Tensor, dtype: torch.dtype) -> Tensor:
    """The number of targets that are not ignored."""
    return _cast(ignored.logical_not().sum(), dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)
