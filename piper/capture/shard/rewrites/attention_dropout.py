"""Attention with dropout, written as the products that torch computes on CPUs: each can be sharded,
and the dropout on a shard draws the numbers that the whole would draw there.

    attention(q, k, v, p)      dropout(softmax(q k' + mask), p) v

On GPUs, fused kernels draw in an order of their own, which shards cannot reproduce.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from piper.capture.graphs import arguments
from piper.capture.shard.placements import SHARDED
from piper.capture.shard.rewrites.table import Form, rewrite
from piper.capture.shard.shard_axis import ShardAxis

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default


@rewrite(aten.dropout.default, torch=False)
def dropout(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """Each element is dropped by itself."""
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
    build = Builder(copy, node)
    query, key, value = (new[it[name]] for name in ("query", "key", "value"))
    width = query.meta["val"].shape[-1]
    given = it.get("scale")
    scale = math.sqrt(1 / math.sqrt(width) if given is None else given)
    if it.get("enable_gqa"):
        times = query.meta["val"].shape[-3] // key.meta["val"].shape[-3]
        repeat = aten.repeat_interleave.self_int
        key, value = (build.call(repeat, x, times, -3) for x in (key, value))
    turned = build.call(aten.transpose.int, key, -2, -1)
    scores = build.call(
        aten.matmul.default,
        build.call(aten.mul.Scalar, query, scale),
        build.call(aten.mul.Scalar, turned, scale),
    )
    scores = _masked(build, scores, it, new)
    weights = build.call(aten._safe_softmax.default, scores, -1)  # a row may be fully masked
    dropped = build.call(aten.dropout.default, weights, it["dropout_p"], True)
    return build.call(aten.matmul.default, dropped, value)


def _masked(
    build: Builder, scores: fx.Node, it: dict[str, Any], new: dict[fx.Node, fx.Node]
) -> fx.Node:
    mask = None if it.get("attn_mask") is None else new[it["attn_mask"]]
    if it.get("is_causal"):
        shape = list(scores.meta["val"].shape[-2:])
        device = scores.meta["val"].device
        whole = build.call(aten.ones.default, shape, dtype=torch.bool, device=device)
        mask = build.call(aten.tril.default, whole)
    if mask is None:
        return scores
    if mask.meta["val"].dtype is not torch.bool:
        return build.call(aten.add.Tensor, scores, mask)
    hidden = build.call(aten.logical_not.default, mask)
    return build.call(aten.masked_fill.Scalar, scores, hidden, -math.inf)


class Builder:
    """Adds operations to ``copy`` in place of ``node``."""

    def __init__(self, copy: fx.Graph, node: fx.Node) -> None:
        self._copy, self._meta = copy, node.meta
        values = (x.meta["val"] for x in (node, *node.all_input_nodes))
        self._mode = next(x.fake_mode for x in values if isinstance(x, FakeTensor))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self._copy.call_function(target, args, kwargs)
        fakes = fx.node.map_arg((args, kwargs), lambda x: x.meta["val"])
        with self._mode, torch.no_grad():
            made.meta = {**self._meta, "val": target(*fakes[0], **fakes[1])}
        return made
