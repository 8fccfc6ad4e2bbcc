"""Attention on shards: rows and heads are independent, and so are queries if each device has all
keys and values. Torch has no single rule for all its kernels.

Causal attention on a device's head and tail of the sequence: keys and values are all-gathered,
their gradients reduce-scattered.

    q S(2), k S(2), v S(2) ─▶ q, [S(2) -> R] k, [S(2) -> R] v ─▶ head_tail_attention ─▶ S(2)

A device that computes one of the repeated key heads (``key_heads.py``) selects the head's part of
each parameter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.base.errors import CaptureError
from piper.capture.graphs import arguments
from piper.capture.operators.head_tail_attention import HEAD_TAIL
from piper.capture.shard.placements import REPLICATED
from piper.capture.shard.rewrites.attention_dropout import ATTENTION
from piper.capture.shard.rewrites.table import Form, Share, rewrite
from piper.capture.shard.shard_axis import ShardAxis

aten = torch.ops.aten
_SEQUENCE = Shard(2)


@rewrite(ATTENTION)
def causal_shards(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """The form of a plain causal attention of whole sequences."""
    it = arguments(node)
    query, key, value = (it[name] for name in ("query", "key", "value"))
    if not axis.head_tail or placed[query] != _SEQUENCE or query in (key, value):
        return None
    x, *shapes = (part.meta["val"].shape for part in (query, key, value))
    plain = it.get("attn_mask") is None and not it.get("dropout_p") and it.get("is_causal")
    if not plain or len(x) != 4 or x[2] != shapes[0][2] or x[3] != shapes[1][3]:
        return None
    whole = query.meta["val"]
    if whole.device.type != "cpu" and whole.dtype is torch.float64:
        raise CaptureError(
            "attention of float64 on a GPU has no kernel for the head and the tail of a sequence: "
            "use another dtype, or attention='all_to_all'"
        )
    given = it.get("scale")
    scale = 1 / math.sqrt(x[-1]) if given is None else given

    def emit(share: Share) -> fx.Node:
        taken = [share.read(part) for part in (query, key, value)]
        both = share.call(HEAD_TAIL, *taken, share.rank(), scale)
        return share.call(operator.getitem, both, 0)

    return Form({query: _SEQUENCE, key: REPLICATED, value: REPLICATED}, _SEQUENCE, emit)


@rewrite(ATTENTION, torch=False)
def attention(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """``is_causal`` means a mask for whole sequences: queries are not sharded with it."""
    it = arguments(node)
    query, *others = (placed[it[name]] for name in ("query", "key", "value"))
    rank = len(it["query"].meta["val"].shape)
    if axis.head_tail:
        apart = query == Shard(2) and rank == 4 and others == [REPLICATED] * 2
        apart = apart and not it.get("is_causal")
    else:
        apart = query == Shard(0) or (query == Shard(1) and rank == 4)
        apart = apart and others == [query] * 2
    if not apart or not _masked_alike(it.get("attn_mask"), placed, query.dim - rank):
        return None
    return Form(placed, query)


def _masked_alike(mask: fx.Node | None, placed: Mapping[fx.Node, Any], dim: int) -> bool:
    """Whether the mask is sharded like the scores along ``dim``, counted from the last."""
    if mask is None:
        return True
    shape = mask.meta["val"].shape
    dim += len(shape)
    broadcast = dim < 0 or shape[dim] == 1
    return bool(placed[mask] == Shard(dim) or (broadcast and placed[mask] == REPLICATED))


@rewrite(HEAD_TAIL, torch=False)
def heads(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """Attention of a device's head and tail of the sequence, sharded further by heads."""
    alike = all(placed[x] == Shard(1) for x in node.args[:3])  # type: ignore[index]
    return Form(placed, (Shard(1), Shard(1))) if alike else None


def repeated_heads(parameter: Tensor, heads: int, times: int) -> Tensor:
    """A parameter, with heads along dimension 0, with each head repeated ``times`` times."""
    apart = parameter.unflatten(0, (heads, -1))
    return apart.repeat_interleave(times, 0).flatten(0, 1)


@rewrite(repeated_heads)
def own_head(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """A device selects its head from the whole parameter."""
    args: Any = node.args
    parameter, heads, times = args

    def selected(whole: Tensor, rank: Tensor) -> Tensor:
        apart = whole.reshape([heads, -1, *whole.shape[1:]])
        return apart.index_select(0, (rank // times).unsqueeze(0)).squeeze(0)

    def emit(share: Share) -> fx.Node:
        whole, rank = share.read(parameter), share.rank()
        return share.run(selected, whole, rank)

    return Form({parameter: REPLICATED}, Shard(0), emit, fixed=True)
