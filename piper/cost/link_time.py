"""How long a communication takes, by the algorithm that suits its size best.

``piper/ir/collectives.py`` says what a member sends, and in how many rounds. Each round takes a
latency. The bytes take the slowest link in a ring or, where each sends to each, the slower of what
goes to devices of the same machine and what goes to others, each over its own link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from piper.cost.tasks import TaskKind
from piper.ir.collectives import ALGORITHMS, Algorithm, CollectiveKind


@dataclass(frozen=True, slots=True)
class Way:
    """What the members of a communication have between them."""

    members: int
    bandwidth: float
    """Bytes a second of one device, where they go round in a ring: of the slowest link."""
    latency: float
    near: float
    """The share of a device's peers that are in its own machine, of the device with fewest."""
    near_bandwidth: float
    far_bandwidth: float
    """Of one device to other machines; infinite if there are none."""

    @property
    def outside(self) -> bool:
        """Whether it leaves a machine."""
        return self.far_bandwidth < math.inf


def communication_seconds(kind: TaskKind | CollectiveKind, way: Way, nbytes: int) -> float:
    """Of a message of ``nbytes``, or of a collective over so many a member: what goes into a
    reduction, or comes out of a gather."""
    n = way.members
    if n == 1:
        return 0.0
    if kind is TaskKind.SEND:
        return nbytes / way.bandwidth + way.latency
    assert isinstance(kind, CollectiveKind), f"{kind} is no communication"
    share = (n - 1) / n * nbytes
    return min(_seconds(x, way, x.sent(nbytes, share)) for x in ALGORITHMS[kind])


def _seconds(algorithm: Algorithm, way: Way, sent: float) -> float:
    latency = algorithm.rounds(way.members) * way.latency
    if not algorithm.direct:
        return sent / way.bandwidth + latency
    near = sent * way.near / way.near_bandwidth
    far = sent * (1 - way.near) / way.far_bandwidth
    return max(near, far) + latency
