"""Causal attention on a device's head and tail of the sequence: keys and values are all-gathered,
their gradients reduce-scattered.

    q S(2), k S(2), v S(2) ─▶ q, [S(2) -> R] k, [S(2) -> R] v ─▶ head_tail_attention ─▶ S(2)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from piper.base.errors import CaptureError
from piper.capture.operators.head_tail_attention import HEAD_TAIL
from piper.capture.shard.placements import REPLICATED
from piper.capture.shard.rewrites.attention_dropout import ATTENTION, arguments
from piper.capture.shard.rewrites.vocab_parallel import Emitter, Rewrite
from piper.capture.shard.shard_axis import ShardAxis
from piper.ir.collectives import Placement

_SEQUENCE = Shard(2)


def wanted_keys(
    node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis
) -> dict[fx.Node, Placement]:
    """The placements that this attention needs of keys and values; empty for other operations."""
    if not axis.head_tail or node.target is not ATTENTION:
        return {}
    it = arguments(node)
    query, key, value = (it[name] for name in ("query", "key", "value"))
    shapes = [x.meta["val"].shape for x in (query, key, value)]
    plain = it.get("attn_mask") is None and not it.get("dropout_p") and it.get("is_causal")
    square = len(shapes[0]) == 4 and shapes[0][2] == shapes[1][2] and shapes[0][3] == shapes[2][3]
    apart = query not in (key, value)
    if not plain or not square or not apart or placed[query] != _SEQUENCE:
        return {}
    return {key: REPLICATED, value: REPLICATED}


def causal_shards(
    node: fx.Node,
    placed: Mapping[fx.Node, Any],
    local: Mapping[fx.Node, fx.Node],
    emit: Emitter,
) -> Rewrite | None:
    """The rewrite of ``node`` for inputs placed as ``placed``, if it is such an attention."""
    if not wanted_keys(node, placed, emit.axis):
        return None
    it = arguments(node)
    query = it["query"].meta["val"]
    if query.device.type != "cpu" and query.dtype is torch.float64:
        raise CaptureError(
            "attention of float64 on a GPU has no kernel for the head and the tail of a sequence: "
            "use another dtype, or attention='all_to_all'"
        )
    given = it.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if given is None else given
    taken = [local[it[name]] for name in ("query", "key", "value")]
    both = emit.call(HEAD_TAIL, *taken, emit.rank(), scale)
    return Rewrite(emit.call(operator.getitem, both, 0), _SEQUENCE)
