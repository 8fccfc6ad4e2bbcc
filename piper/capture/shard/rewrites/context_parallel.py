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
from piper.capture.graphs import arguments
from piper.capture.operators.head_tail_attention import HEAD_TAIL
from piper.capture.shard.placements import REPLICATED
from piper.capture.shard.rewrites.attention_dropout import ATTENTION
from piper.capture.shard.rewrites.table import Form, Share, rewrite
from piper.capture.shard.shard_axis import ShardAxis

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
