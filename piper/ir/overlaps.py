"""Who has what of a value that two groups divide: the parts that a member of each has in common.

2 devices   [ 0         | 1         ]
3 devices   [ 0     | 1     | 2     ]      1 of 3 gets the last third of 0 and the first of 1
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from piper.ir.dag import Group, Transfer


class Overlap(NamedTuple):
    """What a device has in common with ``peer``: a range of the device's own part of the value,
    from 0 for where that begins to 1 for where it ends."""

    peer: int
    start: Fraction
    stop: Fraction

    @property
    def whole(self) -> bool:
        """Whether it is all that the device has."""
        return self.start == 0 and self.stop == 1

    def within(self, size: int) -> tuple[int, int]:
        """Where it begins among ``size`` elements of the device, and how many they are."""
        start, stop = self.start * size, self.stop * size
        assert start.denominator == stop.denominator == 1, "both groups divide the value evenly"
        return int(start), int(stop - start)


def sent_by(op: Transfer, device: int) -> list[Overlap]:
    """What ``device`` sends to each member of the target."""
    return _overlaps(op.source.index(device), len(op.source), op.target)


def received_by(op: Transfer, device: int) -> list[Overlap]:
    """What ``device`` receives from each member of the source."""
    return _overlaps(op.target.index(device), len(op.target), op.source)


def _overlaps(mine: int, parts: int, others: Group) -> list[Overlap]:
    """The members of ``others`` that have something of part ``mine`` of ``parts``."""
    n = len(others)
    first, end = mine * n // parts, -((-mine - 1) * n // parts)
    found = []
    for i in range(first, end):
        start = max(Fraction(i * parts, n) - mine, Fraction(0))
        stop = min(Fraction((i + 1) * parts, n) - mine, Fraction(1))
        found.append(Overlap(others[i], start, stop))
    return found


def scattered(op: Transfer, *, sends: bool) -> bool:
    """Whether what a member sends, or receives, is several parts that do not lie one after
    another in its memory."""
    mine, other = (op.source, op.target) if sends else (op.target, op.source)
    return op.dim > 0 and len(mine) % len(other) != 0
