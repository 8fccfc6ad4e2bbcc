"""The placement of a value along one mesh axis, in DTensor's terms."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeGuard

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from piper.ir.collectives import PartialSum, Placement, Replicated, Sharded

TensorPlacement = Shard | Replicate | Partial
PartPlacement = TensorPlacement | _StridedShard
"""Of one tensor. A strided shard has a part of each of ``split_factor`` equal sections."""
Placements = PartPlacement | tuple["Placements | None", ...]
"""Of one tensor, or of each result of an operation."""

REPLICATED = Replicate()
SHARDED = (Shard, _StridedShard)


@dataclass(frozen=True, slots=True)
class ShardedSections:
    """A dimension of several sections, each sharded separately."""

    dim: int
    sections: tuple[int, ...]

    def __str__(self) -> str:
        return f"S({self.dim}) of {list(self.sections)}"

    def on(self, dim: int, size: int, ways: int) -> ShardedSections | None:
        """The same sections along ``dim``, of ``size``; None if its shards would be uneven."""
        unit, rest = divmod(sum(self.sections), size)
        if rest or any(n % (unit * ways) for n in self.sections):
            return None
        return ShardedSections(dim, tuple(n // unit for n in self.sections))


class RowRole(Enum):
    """What a value of sorted rows is."""

    ROWS = "rows"
    KEYS = "keys"
    """Rows that depend on the sorted keys alone."""
    POSITIONS = "positions"
    """The position before the sort of each row."""
    INVERSE = "inverse"
    """The position after the sort of each row from before."""
    COUNTS = "counts"
    """The sum over a device's rows of how often each key occurs."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows in the order in which each device sorted its own, along dimension 0."""

    order: object
    """Which keys they are sorted by."""
    role: RowRole
    rows: int = 0
    """Rows of the whole before the sort; the whole of what positions index."""
    natural: Shard | ShardedSections | None = None
    """The placement before the sort; that of what positions index."""

    @property
    def dim(self) -> int:
        return 0

    @property
    def like_rows(self) -> Routed:
        return Routed(self.order, RowRole.ROWS)

    @property
    def like_keys(self) -> Routed:
        return Routed(self.order, RowRole.KEYS)

    def __str__(self) -> str:
        return f"{self.role.value} by expert"


LocalLayout = PartPlacement | ShardedSections | Routed
"""Of one value of a sharded region."""


def is_shard(placement: object) -> TypeGuard[Shard | _StridedShard | ShardedSections | Routed]:
    """Whether devices have different parts of a dimension."""
    if isinstance(placement, Routed):
        return placement.role is not RowRole.COUNTS
    return isinstance(placement, (*SHARDED, ShardedSections))


def plain(placement: LocalLayout) -> TensorPlacement:
    """The placement without the order of rows or sections."""
    if isinstance(placement, ShardedSections | Routed | _StridedShard):
        return Shard(placement.dim)
    return placement


def moved_as(placement: TensorPlacement) -> Placement:
    """The placement as collectives know it."""
    match placement:
        case Shard():
            return Sharded(placement.dim)
        case Partial():
            return PartialSum()
        case Replicate():
            return Replicated()


def alike(whole: Any, placement: TensorPlacement) -> Any:
    """``placement`` for a tensor, or for each of several."""
    if isinstance(whole, list | tuple):
        return tuple(placement if isinstance(x, Tensor) else None for x in whole)
    return placement


def sections(placed: Placements) -> int:
    """The number of equal sections of a dimension that are sharded separately."""
    return int(placed.split_factor) if isinstance(placed, _StridedShard) else 1


def in_sections(dim: int, times: int) -> PartPlacement:
    """The placement of a dimension of ``times`` equal sections that are sharded separately."""
    return Shard(dim) if times == 1 else _StridedShard(dim, split_factor=times)
