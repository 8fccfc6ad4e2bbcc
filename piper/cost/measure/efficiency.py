"""The share of a device's peak that matrix products reach, by their shape.

A table has the shares of products whose sizes are powers of a few; between them, the logarithm of
the share is interpolated over the logarithms of the sizes. Sizes are rounded up to whole tiles, and
to the smallest size of the table: a device takes as long for a part of a tile as for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

from piper.base.errors import PiperError

Shape: TypeAlias = tuple[int, int, int]
"""(m, n, k) of a product of [m, k] and [k, n]."""

Shares: TypeAlias = tuple[tuple[tuple[float, ...], ...], ...]
GPU_SIZES = (64, 256, 1024, 4096, 16384)
CPU_SIZES = (16, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a device's peak, for one dtype."""

    sizes: tuple[int, ...]
    """The sizes of m, n and k in the table."""
    shares: Shares
    """By the indices of m, n and k in ``sizes``."""
    tile: int = 1
    """Sizes are rounded up to a multiple of it."""

    def __post_init__(self) -> None:
        count = len(self.sizes)
        growing = count and self.sizes[0] >= 1 and all(a < b for a, b in pairwise(self.sizes))
        if not growing or self.tile < 1:
            raise PiperError(f"efficiency: sizes must grow, from at least 1, not {self.sizes}")
        rows = [self.shares, *self.shares, *(row for plane in self.shares for row in plane)]
        if any(len(row) != count for row in rows):
            raise PiperError(f"efficiency: shares must be {count} x {count} x {count} numbers")
        if not all(0 < x <= 1 for plane in self.shares for row in plane for x in row):
            raise PiperError("efficiency: shares must be above 0 and at most 1")

    @staticmethod
    def measured(
        sizes: tuple[int, ...], share: Callable[[Shape], float], tile: int = 1
    ) -> Efficiency:
        """The table of ``share`` for all shapes of these sizes."""
        table = tuple(tuple(tuple(share((m, n, k)) for k in sizes) for n in sizes) for m in sizes)
        return Efficiency(sizes, table, tile)

    @property
    def best(self) -> float:
        return max(share for plane in self.shares for row in plane for share in row)

    def of(self, shape: Shape) -> float:
        """The share of the peak that a product of ``shape`` reaches."""
        whole = [max(self.sizes[0], -(-size // self.tile) * self.tile) for size in shape]
        used = math.prod(shape) / math.prod(whole)
        places = [self._place(size) for size in whole]
        found = 0.0
        for corner in product((0, 1), repeat=3):
            weight = math.prod(
                part if upper else 1 - part for (_, part), upper in zip(places, corner, strict=True)
            )
            if weight:
                m, n, k = (at + upper for (at, _), upper in zip(places, corner, strict=True))
                found += weight * math.log(self.shares[m][n][k])
        return used * math.exp(found)

    def _place(self, size: int) -> tuple[int, float]:
        """The last size of the table that is not above ``size``, and how far it is to the next."""
        for at, (low, high) in enumerate(pairwise(self.sizes)):
            if size < high:
                return at, math.log(size / low) / math.log(high / low)
        return len(self.sizes) - 1, 0.0


def gpu_rule(best: float, sms: int) -> Efficiency:
    """A rule for GPUs that were not measured. Each multiprocessor computes tiles of 128 x 128: the
    last wave of tiles leaves some idle. Few tiles are split along k. A tile takes a fixed time that
    long sums hide."""

    def share(shape: Shape) -> float:
        m, n, k = shape
        tiles = -(-m // 128) * -(-n // 128)
        tiles *= max(1, min(sms // tiles, k // 512))
        busy = tiles / (sms * -(-tiles // sms))
        return best * busy * k / (k + 128)

    return Efficiency.measured(GPU_SIZES, share, tile=64)
