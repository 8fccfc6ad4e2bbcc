"""How long a communication takes, by the algorithm that suits its size best.

With n members, S bytes, a bandwidth B of the slowest link in a ring, and a latency L:

    all_reduce                    the faster of  2 (n - 1) / n S / B + 2 (n - 1) L          a ring
                                           and   2 S / B + 2 log2(n) L                      a tree
    reduce_scatter, all_gather    (n - 1) / n S / B + log2(n) L                             halving
    all_to_all                    the slower of what goes to devices of the same machine and what
                                  goes to others, each over its own link, + L
    send                          S / B + L
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from piper.ir.dag import CollectiveKind
from piper.lower.tasks import TaskKind


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
    steps = math.ceil(math.log2(n))
    share = (n - 1) / n * nbytes
    match kind:
        case CollectiveKind.ALL_REDUCE:
            ring = 2 * share / way.bandwidth + 2 * (n - 1) * way.latency
            tree = 2 * nbytes / way.bandwidth + 2 * steps * way.latency
            return min(ring, tree)
        case CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_GATHER:
            return share / way.bandwidth + steps * way.latency
        case CollectiveKind.ALL_TO_ALL:
            near = share * way.near / way.near_bandwidth
            far = share * (1 - way.near) / way.far_bandwidth
            return max(near, far) + way.latency
        case TaskKind.SEND:
            return nbytes / way.bandwidth + way.latency
        case TaskKind.PASS | TaskKind.UPDATE | TaskKind.ADD:
            raise AssertionError(f"{kind} is no communication")
