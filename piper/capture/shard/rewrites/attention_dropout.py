"""Attention with dropout, written as the products that torch computes on CPUs: each can be sharded,
and the dropout on a shard draws the numbers that the whole would draw there.

    attention(q, k, v, p)      dropout(softmax(q k' + mask), p) v

On GPUs, fused kernels draw in an order of their own, which shards cannot reproduce: their inputs
are gathered, as those of all other random operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from piper.capture.graphs import arguments, called
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
    build = partial(called, copy, node)
    query, key, value = (new[it[name]] for name in ("query", "key", "value"))
    width = query.meta["val"].shape[-1]
    given = it.get("scale")
    scale = math.sqrt(1 / math.sqrt(width) if given is None else given)
    if it.get("enable_gqa"):
        times = query.meta["val"].shape[-3] // key.meta["val"].shape[-3]
        repeat = aten.repeat_interleave.self_int
        key, value = (build(repeat, x, times, -3) for x in (key, value))
    turned = build(aten.transpose.int, key, -2, -1)
    scores = build(
        aten.matmul.default,
        build(aten.mul.Scalar, query, scale),
        build(aten.mul.Scalar, turned, scale),
    )
    scores = _masked(build, scores, it, new)
    weights = build(aten._safe_softmax.default, scores, -1)  # a row may be fully masked
    dropped = build(aten.dropout.default, weights, it["dropout_p"], True)
    return build(aten.matmul.default, dropped, value)


def _masked(
    build: Callable[..., fx.Node], scores: fx.Node, it: dict[str, Any], new: dict[fx.Node, fx.Node]
) -> fx.Node:
    mask = None if it.get("attn_mask") is None else new[it["attn_mask"]]
    if it.get("is_causal"):
        shape = list(scores.meta["val"].shape[-2:])
        device = scores.meta["val"].device
        whole = build(aten.ones.default, shape, dtype=torch.bool, device=device)
        mask = build(aten.tril.default, whole)
    if mask is None:
        return scores
    if mask.meta["val"].dtype is not torch.bool:
        return build(aten.add.Tensor, scores, mask)
    hidden = build(aten.logical_not.default, mask)
    return build(aten.masked_fill.Scalar, scores, hidden, -math.inf)
