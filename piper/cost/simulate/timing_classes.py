"""Rank equivalence classes by time: a simulation runs one device of a class for all of it.

Devices with one plan may still differ: in their kind, or in the links that their communications go
over, or because one they talk to does. ``timing_classes`` tells them apart as far as
that makes a difference and no further, so that a thousand equal replicas are one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from piper.cost.cluster import Cluster
from piper.cost.link_time import Way
from piper.ir.ops import Collective, Group, Transfer
from piper.ir.plan.instances import Participants, instances, members
from piper.ir.plan.instructions import Instruction, Verb
from piper.ir.plan.plan import Plan


class Participant(NamedTuple):
    """A class that takes part in a communication, and what it does there."""

    number: int
    verb: Verb


@dataclass(frozen=True, slots=True)
class CollectiveInstance:
    """Devices that communicate with one another, of several sets that do the same."""

    participants: Participants
    devices: Group
    way: Way


@dataclass(frozen=True, slots=True)
class Pattern:
    """Who talks to whom in one communication: for each device and verb, its instance."""

    instances: tuple[CollectiveInstance, ...]
    of: dict[tuple[int, Verb], int]


@dataclass(frozen=True, slots=True)
class TimingClass:
    """Devices that take the same time for everything."""

    devices: Group
    plan: int
    """The place of their plan."""


@dataclass(frozen=True)
class TimingClasses:
    """All timing classes of a program on a cluster."""

    classes: tuple[TimingClass, ...]
    patterns: Patterns

    @cached_property
    def _of(self) -> dict[int, int]:
        return {device: i for i, one in enumerate(self.classes) for device in one.devices}

    def instance(
        self, number: int, x: Instruction
    ) -> tuple[frozenset[Participant], CollectiveInstance]:
        """The classes that take part in a communication of class ``number``, itself included, and
        its instance."""
        pattern = self.patterns.of(x)
        found = pattern.instances[pattern.of[self.classes[number].devices[0], x.verb]]
        return frozenset(Participant(self._of[d], verb) for d, verb in found.participants), found


class Patterns:
    """The patterns of communications on a cluster; those of the same groups share one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[object, ...], Pattern] = {}
        self._kept: list[object] = []

    def of(self, x: Instruction) -> Pattern:
        op = x.op
        assert isinstance(op, Transfer | Collective)
        groups: tuple[object, ...] = (
            (op.source, op.target) if isinstance(op, Transfer) else (op.groups,)
        )
        key = (*map(id, groups), *(op.replicas if isinstance(op, Transfer) else ()))
        if key not in self._known:
            self._kept += groups  # their identities are keys
            found = [self._instance(participants) for participants in instances(op)]
            of = {end: i for i, one in enumerate(found) for end in one.participants}
            self._known[key] = Pattern(tuple(found), of)
        return self._known[key]

    def _instance(self, participants: Participants) -> CollectiveInstance:
        devices = members(participants)
        return CollectiveInstance(participants, devices, self._cluster.way(devices))


def timing_classes(
    plans: Sequence[Plan], cluster: Cluster, *, apart: bool = False
) -> TimingClasses:
    """The classes of ``plans`` on ``cluster``: the coarsest division of devices such that those of
    one class have the same plan, the same kind, the same ways, and talk to the same classes; or
    every device ``apart``."""
    patterns = Patterns(cluster)
    mine = [_patterns(plan, patterns) for plan in plans]
    plan_of = {d: i for i, plan in enumerate(plans) for d in plan.devices}
    kinds = {d: d if apart else id(cluster.device(d)) for d in plan_of}
    colour = _numbered({d: (p, kinds[d]) for d, p in plan_of.items()})
    while True:
        seen: dict[int, tuple[object, ...]] = {}
        marks: dict[tuple[int, int], int] = {}
        distinct: dict[tuple[object, ...], int] = {}
        for device, plan in plan_of.items():
            found: list[object] = [colour[device]]
            for pattern, verb in mine[plan]:
                number = pattern.of[device, verb]
                key = id(pattern), number
                if key not in marks:
                    one = pattern.instances[number]
                    participants = sorted((colour[d], v.value) for d, v in one.participants)
                    marks[key] = distinct.setdefault((one.way, *participants), len(distinct))
                found.append(marks[key])
            seen[device] = tuple(found)
        finer = _numbered(seen)
        if len(set(finer.values())) == len(set(colour.values())):
            break
        colour = finer
    members: dict[int, list[int]] = {}
    for device in sorted(plan_of):
        members.setdefault(colour[device], []).append(device)
    classes = tuple(TimingClass(tuple(ds), plan_of[ds[0]]) for ds in members.values())
    return TimingClasses(classes, patterns)


def _patterns(plan: Plan, patterns: Patterns) -> list[tuple[Pattern, Verb]]:
    """Every pattern that a plan takes part in, and with which verb."""
    found: dict[tuple[int, Verb], tuple[Pattern, Verb]] = {}
    for x in plan.instructions:
        if isinstance(x.op, Transfer | Collective):
            pattern = patterns.of(x)
            found.setdefault((id(pattern), x.verb), (pattern, x.verb))
    return list(found.values())


def _numbered(marks: dict[int, tuple[object, ...]]) -> dict[int, int]:
    """Equal marks as equal numbers."""
    numbers: dict[tuple[object, ...], int] = {}
    return {device: numbers.setdefault(mark, len(numbers)) for device, mark in marks.items()}
