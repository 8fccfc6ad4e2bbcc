"""Operations by what they do to sums and means over the rows of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.capture.graphs import arguments
from piper.capture.shard.placements import Placements

aten = torch.ops.aten

BATCH_NORMS = (
    aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit, aten.native_batch_norm,
    aten.batch_norm, aten._batch_norm_impl_index, aten.cudnn_batch_norm,
    aten._batch_norm_with_update_functional, aten._batch_norm_with_update,
)  # fmt: skip
CASTS = (
    aten.to, aten._to_copy, aten.clone, aten.detach, aten.alias, aten.view, aten.reshape,
    aten.squeeze, aten.unsqueeze, aten.neg, aten.contiguous, aten.type_as, aten.expand,
)  # fmt: skip
"""Operations on one value that are linear in it, and keep each row of it."""
ADDITIONS = (aten.add, aten.sub)
SUMS, MEANS = (aten.sum, aten.count_nonzero), (aten.mean,)
KEEP_DEGREE = (
    *CASTS, *ADDITIONS, aten.clamp, aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum,
    aten.where,
)  # fmt: skip
MEAN, SUM = 1, 2
"""``reduction=`` of a loss."""
QUOTIENTS = (aten.div.Tensor, aten.true_divide.Tensor)
PRODUCTS = (aten.mul.Tensor,)
_REDUCTIONS = (*SUMS, *MEANS, aten.nansum, aten.trace)
LINEAR = (
    *CASTS, *ADDITIONS, aten.rsub, aten.sum, aten.mean, aten.select, aten.slice, aten.stack,
    aten.cat, aten.unbind, aten.split, aten.split_with_sizes, aten.flatten, aten.permute,
    aten.transpose, aten.t, aten.nan_to_num, aten.index_select, aten.zeros_like, aten.ones_like,
    aten.full_like, aten.lift_fresh_copy, aten.repeat, aten.diagonal, aten.trace,
)  # fmt: skip
BILINEAR = (
    aten.mul, aten.mm, aten.bmm, aten.matmul, aten.dot, aten.mv, aten.linear, aten.addmm,
    aten.where, aten.masked_fill, aten.gather, aten.einsum,
)  # fmt: skip
MATRIX_PRODUCTS = (aten.mm, aten.bmm, aten.matmul, aten.dot, aten.einsum, aten.linear, aten.addmm)
ACROSS = (
    *MATRIX_PRODUCTS, aten._softmax, aten._log_softmax, aten.softmax, aten.log_softmax,
    aten.logsumexp, aten.var, aten.std, aten.var_mean, aten.norm, aten.linalg_vector_norm,
    aten.roll, aten.flip, aten.amax, aten.amin, aten.cdist, aten.cosine_similarity,
)  # fmt: skip
OFFSETS = (aten.slice, aten.diff, aten.cumsum, aten.searchsorted, aten.bucketize)


def uses_batch(node: fx.Node) -> bool:
    """Whether a batch norm uses the statistics of the batch."""
    given = arguments(node)
    return bool(given.get("training", given.get("train", "update" in str(node.target))))


def packet_of(node: fx.Node) -> Any:
    """The operation of a node, whatever its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def is_single(node: fx.Node) -> bool:
    """Whether a node makes a tensor of one number."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 1


def reduces(node: fx.Node, packet: Any) -> bool:
    """Whether ``node`` is a sum or a mean, or a loss that returns one."""
    if packet in _REDUCTIONS:
        return True
    value = node.meta["val"]
    return "reduction" in arguments(node) and isinstance(value, Tensor) and value.dim() == 0


def is_sum(node: fx.Node, packet: Any) -> bool | None:
    """Whether a reduction is a sum (True) or a mean (False)."""
    if packet in (aten.sum, aten.mean):
        return packet is aten.sum
    return {MEAN: False, SUM: True}.get(arguments(node).get("reduction", 0))


def is_real(node: fx.Node) -> bool:
    value = node.meta["val"]
    first = value if isinstance(value, Tensor) else next(iter(value), None)
    return isinstance(first, Tensor) and first.is_floating_point()


def sums_over_rows(node: fx.Node, placed: Mapping[fx.Node, Placements]) -> bool:
    """Whether a product sums over the rows of both arguments: ``x.T @ y``."""
    if node.target not in (aten.mm.default, aten.matmul.default):
        return False
    return [placed.get(x) for x in node.args if isinstance(x, fx.Node)] == [Shard(1), Shard(0)]


def is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def counts_of(node: fx.Node) -> set[int]:
    """Element counts that a reduction may have covered: products of the leading dimensions."""
    while isinstance(node, fx.Node) and is_single(node) and node.args:
        first = node.args[0]
        if not isinstance(first, fx.Node):
            return set()
        node = first
    shape = node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else ()
    return {math.prod(shape[:i]) for i in range(1, len(shape) + 1)} - {1}
