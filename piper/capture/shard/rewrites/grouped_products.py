"""Products of rows that are sorted by expert. Along an axis of tensor parallelism, weights may be
sharded along the output or the summed dimension, biases along the output dimension. Along an axis
of experts, each device has all rows of its experts; along an axis of rows, all experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.distributed.tensor import Partial, Shard

from piper.capture.operators.grouped_mm import EXPERT_OFFSETS, EXPERT_ROWS, GROUPED_MM
from piper.capture.shard.placements import REPLICATED, TensorPlacement
from piper.capture.shard.rewrites.table import Form, rewrite
from piper.capture.shard.shard_axis import PartAxis, ShardAxis

_FIRST = Shard(0)
_Row = tuple[list[TensorPlacement], TensorPlacement]
_PLACEMENTS: Mapping[tuple[PartAxis | None, object], list[_Row]] = {
    (None, GROUPED_MM): [
        ([REPLICATED, Shard(2), REPLICATED], Shard(1)),
        ([Shard(1), Shard(1), REPLICATED], Partial()),
    ],
    (None, EXPERT_ROWS): [([Shard(1), REPLICATED], Shard(1))],
    (PartAxis.EXPERTS, EXPERT_OFFSETS): [([_FIRST], _FIRST)],
    (PartAxis.EXPERTS, GROUPED_MM): [([REPLICATED, _FIRST, _FIRST], REPLICATED)],
    (PartAxis.EXPERTS, EXPERT_ROWS): [([_FIRST, _FIRST], REPLICATED)],
    (PartAxis.ROWS, GROUPED_MM): [([_FIRST, REPLICATED, REPLICATED], _FIRST)],
    (PartAxis.ROWS, EXPERT_ROWS): [([REPLICATED, REPLICATED], _FIRST)],
}
"""The placements of the tensors of an operation, and of its result."""


@rewrite(EXPERT_OFFSETS)
@rewrite(GROUPED_MM, EXPERT_ROWS, torch=False)
def products(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    given = [placed[x] for x in node.args if isinstance(x, fx.Node)]
    for taken, made in _PLACEMENTS.get((axis.sorted_rows, node.target), ()):
        if given == taken:
            return Form(placed, made)
    return None
