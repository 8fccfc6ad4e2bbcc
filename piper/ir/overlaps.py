"""The overlaps between the shards of one value in two groups: what each pair of devices transfers.

2 devices   [ 0         | 1         ]
3 devices   [ 0     | 1     | 2     ]      1 of 3 gets the last third of 0 and the first of 1

If several source devices hold the same part, each target device gets it from one of them.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from piper.ir.ops import Group, Transfer


class Overlap(NamedTuple):
    """The range of a device's own part that overlaps the part of ``peer``, as fractions: 0 is the
    begin of the device's part, 1 its end."""

    peer: int
    start: Fraction
    stop: Fraction

    @property
    def whole(self) -> bool:
        """Whether the range is the device's whole part."""
        return self.start == 0 and self.stop == 1

    def within(self, size: int) -> tuple[int, int]:
        """The offset and length of the range in the device's ``size`` elements."""
        start, stop = self.start * size, self.stop * size
        assert start.denominator == stop.denominator == 1, "both groups divide the value evenly"
        return int(start), int(stop - start)


def sent_by(op: Transfer, device: int) -> list[Overlap]:
    """The ranges that ``device`` sends, one per target device."""
    mine = op.source.index(device) // op.replicas[0]
    return [
        Overlap(peer, start, stop)
        for part, start, stop in _overlaps(mine, *op.parts)
        for peer in _replicas(op.target, op.replicas[1], part)
        if _sender(op, mine, peer) == device
    ]


def received_by(op: Transfer, device: int) -> list[Overlap]:
    """The ranges that ``device`` receives, one per source device."""
    mine = op.target.index(device) // op.replicas[1]
    return [
        Overlap(_sender(op, part, device), start, stop)
        for part, start, stop in _overlaps(mine, *reversed(op.parts))
    ]


def scattered(op: Transfer, *, sends: bool) -> bool:
    """Whether the parts that a member sends, or receives, are not contiguous in its memory."""
    mine, other = op.parts if sends else reversed(op.parts)
    return op.dim > 0 and mine % other != 0


def most_overlaps(parts: int, others: int) -> int:
    """The most of ``others`` equal parts that one of ``parts`` equal parts overlaps."""
    period = parts // math.gcd(parts, others)
    return max(len(_overlaps(i, parts, others)) for i in range(period))


def _overlaps(mine: int, parts: int, others: int) -> list[tuple[int, Fraction, Fraction]]:
    """The ones of ``others`` parts that overlap part ``mine`` of ``parts``, each with the start and
    stop of the overlap within ``mine``."""
    first, end = mine * others // parts, -((-mine - 1) * others // parts)
    overlaps = []
    for i in range(first, end):
        start = max(Fraction(i * parts, others) - mine, Fraction(0))
        stop = min(Fraction((i + 1) * parts, others) - mine, Fraction(1))
        overlaps.append((i, start, stop))
    return overlaps


def _replicas(group: Group, replicas: int, part: int) -> Group:
    """The members of ``group`` that hold ``part``."""
    return group[part * replicas : (part + 1) * replicas]


def _sender(op: Transfer, part: int, target: int) -> int:
    """The device that sends ``part`` to ``target``: ``target`` itself if it holds the part;
    otherwise the replicas take turns."""
    owners = _replicas(op.source, op.replicas[0], part)
    if target in owners:
        return target
    return owners[op.target.index(target) % op.replicas[1] % len(owners)]
