"""Who has what of a value that two groups divide: the parts that a member of each has in common.

2 devices   [ 0         | 1         ]
3 devices   [ 0     | 1     | 2     ]      1 of 3 gets the last third of 0 and the first of 1

Where several have the same part, each member of the target gets it from one of them.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from piper.ir.ops import Group, Transfer


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
    mine = op.source.index(device) // op.replicas[0]
    return [
        Overlap(peer, start, stop)
        for part, start, stop in _overlaps(mine, *op.parts)
        for peer in _replicas(op.target, op.replicas[1], part)
        if _sender(op, mine, peer) == device
    ]


def received_by(op: Transfer, device: int) -> list[Overlap]:
    """What ``device`` receives from each member of the source."""
    mine = op.target.index(device) // op.replicas[1]
    return [
        Overlap(_sender(op, part, device), start, stop)
        for part, start, stop in _overlaps(mine, *reversed(op.parts))
    ]


def scattered(op: Transfer, *, sends: bool) -> bool:
    """Whether what a member sends, or receives, is several parts that do not lie one after
    another in its memory."""
    mine, other = op.parts if sends else reversed(op.parts)
    return op.dim > 0 and mine % other != 0


def most_overlaps(parts: int, others: int) -> int:
    """Of how many of ``others`` parts one of ``parts`` has something, at most."""
    period = parts // math.gcd(parts, others)
    return max(len(_overlaps(i, parts, others)) for i in range(period))


def _overlaps(mine: int, parts: int, others: int) -> list[tuple[int, Fraction, Fraction]]:
    """Those of ``others`` parts that have something of part ``mine`` of ``parts``, and where in
    that it begins and ends."""
    first, end = mine * others // parts, -((-mine - 1) * others // parts)
    found = []
    for i in range(first, end):
        start = max(Fraction(i * parts, others) - mine, Fraction(0))
        stop = min(Fraction((i + 1) * parts, others) - mine, Fraction(1))
        found.append((i, start, stop))
    return found


def _replicas(group: Group, replicas: int, part: int) -> Group:
    """The members of ``group`` that have a part."""
    return group[part * replicas : (part + 1) * replicas]


def _sender(op: Transfer, part: int, target: int) -> int:
    """Who sends its part to ``target``: itself, if it has it; otherwise replicas take turns."""
    owners = _replicas(op.source, op.replicas[0], part)
    if target in owners:
        return target
    return owners[op.target.index(target) % op.replicas[1] % len(owners)]
