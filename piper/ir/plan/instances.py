"""The instances of a communication: the sets of devices, each with its verb, that communicate with
each other. One node of the DAG may hold many instances side by side."""

from __future__ import annotations

import math

from piper.ir.ops import Collective, Transfer
from piper.ir.plan.instructions import Verb

Participants = tuple[tuple[int, Verb], ...]
"""The devices of one instance, each with its verb."""


def members(participants: Participants) -> tuple[int, ...]:
    """The devices of an instance, each once."""
    return tuple(dict.fromkeys(device for device, _ in participants))


def instance_size(op: Transfer | Collective) -> int:
    """The number of participants of each instance."""
    if isinstance(op, Collective):
        return len(op.groups[0])
    return (len(op.source) + len(op.target)) // math.gcd(*op.parts)


def instances(op: Transfer | Collective) -> tuple[Participants, ...]:
    """The instances of ``op``. An instance of a transfer between groups of different size has the
    fewest adjacent devices of both groups that hold the same range of the value."""
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
