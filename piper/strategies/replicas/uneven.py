"""``uneven``: replicas on devices of unequal speed get microbatches in proportion.

    dp=2, 4 microbatches     [0 1] [2 3] [4 5] [6 7]     two parts each, one for each device
    speeds [1.0, 0.6]        0: 0 2 3 5 7    1: 1 4 6

Stages on faster devices get more of the model; with a profile all of it is measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from piper.base.errors import DirectiveError
from piper.base.units import counted
from piper.cost.recorded import Recorded
from piper.ir.dag.filters import Filter
from piper.ir.grouped import grouped
from piper.strategies.directives import Directive
from piper.strategies.directives.directive import check_speeds
from piper.strategies.directives.partition import PROFILE, Partition
from piper.strategies.directives.place import Place
from piper.strategies.replicas.replicas import Replicas
from piper.strategies.strategy import Strategy


def uneven(strategy: Strategy, speeds: Sequence[float] | Mapping[int, float]) -> Strategy:
    """``strategy`` with as many microbatches on each data-parallel replica as its speed allows.

    ``speeds`` has one number for each replica, or maps each device to its speed; the slowest
    device of a replica counts. Only their ratios matter. All replicas together compute as many
    microbatches as before, each with the rows that one replica had of one: the losses are equal up
    to reduction order. The slowest replica finishes as early as possible.
    """
    try:
        found = Replicas.of(strategy)
        shares = shares_of(_by_replica(found, speeds), found.count * found.microbatches)
        if len(set(shares)) == 1:
            return strategy
        return found.dealt(shares)
    except DirectiveError as error:
        raise DirectiveError(
            f"this strategy cannot give its replicas unequal numbers of microbatches: {error}"
        ) from None


def by_device(
    devices: Sequence[int], speeds: Sequence[float] | Mapping[int, float]
) -> dict[int, float]:
    """The speed of each of ``devices``, given by its number, or in their order."""
    if isinstance(speeds, Mapping):
        if missing := [d for d in devices if d not in speeds]:
            raise DirectiveError(f"speeds= has none for the devices {missing}: give one for each")
        speeds = [speeds[d] for d in devices]
    return dict(zip(devices, check_speeds(speeds, len(devices), "device"), strict=True))


def _by_replica(found: Replicas, speeds: Sequence[float] | Mapping[int, float]) -> Sequence[float]:
    if not isinstance(speeds, Mapping):
        return check_speeds(speeds, found.count, "replica")
    known = by_device([d for row in found.devices for d in row], speeds)
    return [min(known[d] for d in row) for row in found.devices]


@dataclass(frozen=True, slots=True)
class MeshSpeeds:
    """The speeds of the devices of a mesh: those of its ranks, and of devices beside them."""

    ranks: tuple[float, ...]
    devices: Mapping[int, float]
    """How fast each device does its share of a microbatch."""

    @staticmethod
    def of(
        ranks: Sequence[Sequence[int]],
        replicas: int,
        speeds: Sequence[float] | Mapping[int, float],
        work: Sequence[float] | None = None,
    ) -> MeshSpeeds:
        """Of ``ranks`` of so many replicas. Each rank has ``work`` to do, by default in proportion
        to the speed of its devices."""
        known = by_device(sorted(d for rank in ranks for d in rank), speeds)
        each = len(ranks[0]) // replicas
        cuts = [[rank[i : i + each] for i in range(0, len(rank), each)] for rank in ranks]
        slowest = [[min(known[d] for d in cut) for cut in row] for row in cuts]
        fast = [sum(row) for row in slowest]
        return MeshSpeeds(
            tuple(speed / max(fast) for speed in fast),
            {
                d: speed / done
                for row, paces, done in zip(cuts, slowest, work or fast, strict=True)
                for cut, speed in zip(row, paces, strict=True)
                for d in cut
            },
        )

    def stages(self, ranks: Sequence[Iterable[int]]) -> list[float] | None:
        """The speed of each stage, whose numbers are given by rank; None if all are equal."""
        homes = grouped((stage, r) for r, stages in enumerate(ranks) for stage in stages)
        speeds = [sum(self.ranks[r] for r in homes[s]) / len(homes[s]) for s in sorted(homes)]
        return speeds if len(set(speeds)) > 1 else None


def by_profile(strategy: Strategy, recorded: Recorded) -> Strategy:
    """``strategy`` with measured costs in place of ``by="profile"``, and, if devices were measured
    one by one, with the speeds of those on which the stages are."""
    made: list[Directive] = []
    for directive in strategy.directives:
        if isinstance(directive, Partition) and directive.by == PROFILE:
            speeds = directive.speeds
            if speeds is None and recorded.speeds and directive.parts > 1:
                speeds = _of_stages(strategy, directive, recorded.speeds)
            costs = recorded.regions(directive.tag)
            directive = replace(directive, by=costs, speeds=speeds)
        made.append(directive)
    return Strategy(made)


def _of_stages(
    strategy: Strategy, stages: Partition, speeds: Mapping[int, float]
) -> tuple[float, ...]:
    """The speeds of the devices of each stage together."""
    found = []
    for stage in range(stages.parts):
        on = {
            d
            for place in strategy.directives
            if isinstance(place, Place)
            for where in [Filter.of({stages.into: dict(place.where).get(stages.into, "*")})]
            if where.accepts({stages.into: stage})
            for d in place.devices
        }
        found.append(sum(speeds.get(d, 1.0) for d in on) or 1.0)
    return tuple(speed / max(found) for speed in found)


def shares_of(speeds: Sequence[float], total: int) -> list[int]:
    """How many of ``total`` microbatches each replica gets, such that the last to finish finishes
    as early as possible. Refuses to leave a replica without any."""
    shares = [0] * len(speeds)
    ends = [(1 / speed, speed, i) for i, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for _ in range(total):
        _, _, i = ends[0]
        shares[i] += 1
        heapq.heapreplace(ends, ((shares[i] + 1) / speeds[i], speeds[i], i))
    idle = [i for i, share in enumerate(shares) if not share]
    if idle:
        raise DirectiveError(
            f"replica {idle[0]}, with a speed of {speeds[idle[0]]:g} beside {max(speeds):g}, would "
            f"get none of {counted(total, 'microbatch')}, because one alone takes it longer than "
            "all take the others: give more microbatches, or leave its devices out"
        )
    return shares
