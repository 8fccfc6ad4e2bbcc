"""Views that merge a sharded sequence with the rows before it into one dimension, and views that
split it again: the sequence of each row stays sharded, and nothing is communicated.

    [rows, seq S, 64] ─▶ [rows * seq, 64], a section for each row ─▶ [rows, seq S, 8, 8]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from piper.capture.shard.rewrites.fused_weights import ShardedSections

aten = torch.ops.aten
VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)


def flattened(node: fx.Node, now: Mapping[fx.Node, Any], parts: int) -> ShardedSections | None:
    """The placement of a view that merges the sharded dimension with those before it."""
    if node.target not in VIEWS or len(now) != 1:
        return None
    ((source, placement),) = now.items()
    if not isinstance(placement, Shard):
        return None
    shape, made = source.meta["val"].shape, node.meta["val"].shape
    before = math.prod(shape[: placement.dim])
    for dim, size in enumerate(made):
        outside = math.prod(made[:dim])
        rows, rest = divmod(before, outside)
        if rest or rows < 2 or size % rows:
            continue
        section = size // rows
        if section % shape[placement.dim] == 0 and section % parts == 0:
            return ShardedSections(dim, (section,) * rows)
    return None


def unflattened(
    node: fx.Node, packed: ShardedSections, parts: int
) -> Shard | ShardedSections | None:
    """The placement of a view of separately sharded sections."""
    (source,) = node.all_input_nodes
    shape, made = source.meta["val"].shape, node.meta["val"].shape
    if len(set(packed.sections)) > 1:
        return None
    rows = len(packed.sections)
    outside = math.prod(shape[: packed.dim])
    for dim, size in enumerate(made):
        before = math.prod(made[:dim])
        if before == outside * rows and size > 1:
            whole = packed.sections[0] % size == 0 or size % packed.sections[0] == 0
            return Shard(dim) if size % parts == 0 and whole else None
        times, rest = divmod(outside, before)
        if not rest and times > 1 and size == times * shape[packed.dim]:
            return ShardedSections(dim, packed.sections * times)
        times, rest = divmod(before, outside)
        if not rest and times > 1 and size * times == shape[packed.dim] and rows % times == 0:
            return ShardedSections(dim, packed.sections[: rows // times])
        if before == outside and size > rows:
            section, left = divmod(size, rows)
            whole = packed.sections[0] % section == 0 or section % packed.sections[0] == 0
            even = not left and section % parts == 0
            return ShardedSections(dim, (section,) * rows) if even and whole else None
    return None
