"""An axis of devices along which values are sharded, and the part of a dimension each device has.

Along most axes device i of n has part i of n. If keys and values are gathered for attention, it has
parts i and 2n - 1 - i of 2n, head and tail, so that all devices have equal work under a causal
mask:

    n = 2     0 1 2 3     device 0 has 0 and 3, device 1 has 1 and 2
"""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.shards import ContextAttention


@dataclass(frozen=True, slots=True)
class ShardAxis:
    name: str
    ways: int
    context: ContextAttention | None = None
    """How attention is computed if the axis shards the sequence of the batch."""

    @property
    def head_tail(self) -> bool:
        """Whether a shard consists of two parts of a dimension."""
        return self.context is ContextAttention.ALL_GATHER

    @property
    def parts(self) -> int:
        """The number of parts of a dimension, which must be of equal size."""
        return 2 * self.ways if self.head_tail else self.ways

    @property
    def dealt(self) -> list[int]:
        """The parts of a dimension, ordered by device."""
        last = self.parts - 1
        return [part for i in range(self.ways) for part in (i, last - i)]
