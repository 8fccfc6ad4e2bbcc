"""Who meets whom in a communication: the sets of devices, each with its side, that exchange data
with one another. One node of the DAG may hold many such sets, side by side."""

from __future__ import annotations

from piper.ir.dag import Collective, Transfer
from piper.lower.plan import Verb

Sides = tuple[tuple[int, Verb], ...]
"""Devices that meet, each with what it does there."""


def meeting_size(op: Transfer | Collective) -> int:
    """How many devices meet in each of ``meetings``."""
    if isinstance(op, Collective):
        return len(op.groups[0])
    small, large = sorted((len(op.source), len(op.target)))
    return 1 + large // small


def meetings(op: Transfer | Collective) -> tuple[Sides, ...]:
    """The meetings of ``op``. Of two groups that differ in size, each member of the smaller one
    meets as many neighbours of the larger."""
    if isinstance(op, Collective):
        return tuple(tuple((d, Verb.COLLECTIVE) for d in group) for group in op.groups)
    small, large = sorted((op.source, op.target), key=len)
    each = len(large) // len(small)
    found = []
    for i, one in enumerate(small):
        many = large[i * each : (i + 1) * each]
        sources, targets = ((one,), many) if small is op.source else (many, (one,))
        sends = tuple((d, Verb.SEND) for d in sources)
        found.append((*sends, *((d, Verb.RECV) for d in targets)))
    return tuple(found)
