"""The seconds of a communication, with the fastest algorithm for its size.

``piper/ir/collectives.py`` has the bytes that a member sends, and the number of rounds. A round
takes the latency of the slowest link, in a ring the mean latency of its hops. In a ring, the
slowest link limits the bytes. If each member sends to each, traffic inside a machine and traffic to
other machines use separate links, and the slower of the two counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from piper.cost.tasks import TaskKind
from piper.ir.collectives import COLLECTIVES, Algorithm, Move, Route


@dataclass(frozen=True, slots=True)
class Way:
    """The links between the members of a communication."""

    members: int
    bandwidth: float
    """Bytes per second of one device in a ring, limited by the slowest link."""
    latency: float
    hop: float
    """The mean latency between neighbours of the ring."""
    near: float
    """The share of a device's peers in its own machine, for the device with the fewest."""
    near_bandwidth: float
    far_bandwidth: float
    """Bytes per second of one device to other machines; infinite if all are in one machine."""

    @property
    def outside(self) -> bool:
        """Whether it crosses machines."""
        return self.far_bandwidth < math.inf


def communication_seconds(kind: TaskKind | Move, way: Way, nbytes: int) -> float:
    """Seconds of a message of ``nbytes``, or of a collective with ``nbytes`` per member: the input
    of a reduction, or the output of a gather."""
    n = way.members
    if n == 1:
        return 0.0
    if kind is TaskKind.SEND:
        return nbytes / way.bandwidth + way.latency
    assert isinstance(kind, Move), f"{kind} is no communication"
    share = (n - 1) / n * nbytes
    return min(_seconds(x, way, x.sent(nbytes, share)) for x in COLLECTIVES[kind].algorithms)


def _seconds(algorithm: Algorithm, way: Way, sent: float) -> float:
    ring = algorithm.route is Route.RING
    latency = algorithm.rounds(way.members) * (way.hop if ring else way.latency)
    if algorithm.route is not Route.DIRECT:
        return sent / way.bandwidth + latency
    near = sent * way.near / way.near_bandwidth
    far = sent * (1 - way.near) / way.far_bandwidth
    return max(near, far) + latency
