"""An axis of devices along which values are sharded, and the part of a dimension each device has.

Along most axes device i of n has part i of n. If keys and values are gathered for attention, it has
parts i and 2n - 1 - i of 2n, head and tail, so that all devices have equal work under a causal
mask:

    n = 2     0 1 2 3     device 0 has 0 and 3, device 1 has 1 and 2
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from piper.ir.shards import ContextAttention


class PartAxis(Enum):
    """The axes along which devices hold different parts of a region of experts."""

    EXPERTS = "experts"
    ROWS = "rows"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class ShardAxis:
    name: str
    ways: int
    context: ContextAttention | None = None
    """How attention is computed if the axis shards the sequence of the batch."""
    sorted_rows: PartAxis | None = None
    """What it shards of rows that are sorted by expert."""
    times: Fraction = Fraction(1)
    """The size of a dimension on all devices, relative to the graph: a region was captured with the
    rows of one device, and experts get those of several."""

    @property
    def head_tail(self) -> bool:
        """Whether a shard consists of two parts of a dimension."""
        return self.context is ContextAttention.ALL_GATHER

    @property
    def parts(self) -> int:
        """The number of parts of a dimension, which must be of equal size."""
        return 2 * self.ways if self.head_tail else self.ways

    def shard(self, size: int) -> int:
        """The size of a device's shard; if it is uneven, it is padded."""
        return -(-int(size * self.times) // self.ways)

    @property
    def dealt(self) -> list[int]:
        """The parts of a dimension, ordered by device."""
        last = self.parts - 1
        return [part for i in range(self.ways) for part in (i, last - i)]
