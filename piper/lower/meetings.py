"""Who meets whom in a communication: the sets of devices, each with its side, that exchange data
with one another. One node of the DAG may hold many such sets, side by side."""

from __future__ import annotations

import math

from piper.ir.dag import Collective, Transfer
from piper.lower.plan import Verb

Sides = tuple[tuple[int, Verb], ...]
"""Devices that meet, each with what it does there."""


def members(sides: Sides) -> tuple[int, ...]:
    """The devices of a meeting, each once."""
    return tuple(dict.fromkeys(device for device, _ in sides))


def meeting_size(op: Transfer | Collective) -> int:
    """How many devices meet in each of ``meetings``."""
    if isinstance(op, Collective):
        return len(op.groups[0])
    return (len(op.source) + len(op.target)) // math.gcd(*op.parts)


def meetings(op: Transfer | Collective) -> tuple[Sides, ...]:
    """The meetings of ``op``. Of two groups that differ in size, as few neighbours of each meet as
    have the same of the value."""
    if isinstance(op, Collective):
        return tuple(tuple((d, Verb.COLLECTIVE) for d in group) for group in op.groups)
    count = math.gcd(*op.parts)
    sources, targets = len(op.source) // count, len(op.target) // count
    return tuple(
        (
            *((d, Verb.SEND) for d in op.source[i * sources : (i + 1) * sources]),
            *((d, Verb.RECV) for d in op.target[i * targets : (i + 1) * targets]),
        )
        for i in range(count)
    )
