"""Attention with dropout, written as the products that torch computes on CPUs: each can be sharded,
and the dropout on a shard draws the numbers that the whole would draw there.

    attention(q, k, v, p)      dropout(softmax(q k' + mask), p) v

On GPUs, fused kernels draw in an order of their own, which shards cannot reproduce: their inputs
are gathered, as those of all other random operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.capture.graphs import arguments, inlined
from piper.capture.shard.placements import SHARDED
from piper.capture.shard.rewrites.table import Form, Share, rewrite
from piper.capture.shard.shard_axis import ShardAxis

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default


@rewrite(aten.dropout.default)
def dropout(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """A device multiplies its shard by its part of the noise that the whole would draw."""
    (source,) = node.all_input_nodes
    sharded = placed[source]
    if not isinstance(sharded, Shard):
        return None

    def emit(share: Share) -> fx.Node:
        part = share.noise(node, sharded.dim)
        return share.call(aten.mul.Tensor, share.read(source), part)

    return Form(placed, sharded, emit)


@rewrite(aten.dropout.default, torch=False)
def parts(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """Each element is dropped by itself: experts draw numbers of their own."""
    (source,) = node.all_input_nodes
    return Form(placed, placed[source]) if isinstance(placed[source], SHARDED) else None


def drops(node: fx.Node) -> bool:
    """Whether ``node`` is attention with dropout on a CPU."""
    return (
        node.target is ATTENTION
        and bool(arguments(node).get("dropout_p"))
        and node.meta["val"].device.type == "cpu"
    )


def in_products(copy: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    """The attention ``node`` as products in ``copy``; ``new`` maps nodes to their copies."""
    it = arguments(node)
    tensors = [it[name] for name in ("query", "key", "value", "attn_mask") if it.get(name)]
    given = it.get("scale")

    def products(query: Tensor, key: Tensor, value: Tensor, *masks: Tensor) -> Tensor:
        scale = math.sqrt(1 / math.sqrt(query.shape[-1]) if given is None else given)
        if it.get("enable_gqa"):
            times = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(times, -3) for x in (key, value))
        turned = key.transpose(-2, -1)
        scores = aten.mul.Scalar(query, scale) @ aten.mul.Scalar(turned, scale)
        mask = next(iter(masks), None)
        if it.get("is_causal"):
            shape = list(scores.shape[-2:])
            mask = aten.ones.default(shape, dtype=torch.bool, device=key.device).tril()
        if mask is not None and mask.dtype is torch.bool:
            scores = scores.masked_fill(mask.logical_not(), -math.inf)
        elif mask is not None:
            scores = scores + mask
        weights = aten._safe_softmax.default(scores, -1)  # a row may be fully masked
        return torch.dropout(weights, it["dropout_p"], True) @ value

    made, result = inlined(copy, products, *(new[x] for x in tensors))
    for x in made:
        x.meta = {**node.meta, **x.meta}
    return result
