"""The placement of a value along one mesh axis, in DTensor's terms."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from piper.ir.collectives import Placement

PartPlacement = Placement | _StridedShard
"""Of one tensor. A strided shard has a part of each of ``split_factor`` equal sections."""
Placements = PartPlacement | tuple["Placements | None", ...]
"""Of one tensor, or of each result of an operation."""

REPLICATED = Replicate()
SHARDED = (Shard, _StridedShard)


def alike(whole: Any, placement: Placement) -> Any:
    """``placement`` for a tensor, or for each of several."""
    if isinstance(whole, list | tuple):
        return tuple(placement if isinstance(x, Tensor) else None for x in whole)
    return placement


def sections(placed: Placements) -> int:
    """The number of equal sections of a dimension that are sharded separately."""
    return int(placed.split_factor) if isinstance(placed, _StridedShard) else 1


def repeated(placed: Placements, times: int) -> Placements:
    """The placement of ``times`` tensors joined along the dimension that is sharded."""
    assert isinstance(placed, SHARDED)
    return _StridedShard(placed.dim, split_factor=times * sections(placed))
