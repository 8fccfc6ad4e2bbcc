"""A device computes one of the repeated key heads: it selects the head's part of each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.capture.shard.placements import REPLICATED
from piper.capture.shard.rewrites.table import Form, Share, rewrite
from piper.capture.shard.shard_axis import ShardAxis

aten = torch.ops.aten


def repeated_heads(parameter: Tensor, heads: int, times: int) -> Tensor:
    """A parameter, with heads along dimension 0, with each head repeated ``times`` times."""
    apart = parameter.unflatten(0, (heads, -1))
    return apart.repeat_interleave(times, 0).flatten(0, 1)


@rewrite(repeated_heads)
def own_head(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """A device selects its head from the whole parameter."""
    parameter, heads, times = node.args
    assert isinstance(parameter, fx.Node)
    shape = list(parameter.meta["val"].shape)

    def emit(share: Share) -> fx.Node:
        apart = share.call(aten.reshape.default, share.read(parameter), [heads, -1, *shape[1:]])
        first = share.call(aten.floor_divide.default, share.rank(), times)
        index = share.call(aten.unsqueeze.default, first, 0)
        head = share.call(aten.index_select.default, apart, 0, index)
        return share.call(aten.squeeze.dim, head, 0)

    return Form({parameter: REPLICATED}, Shard(0), emit, fixed=True)
