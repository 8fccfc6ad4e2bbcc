"""Rank equivalence classes by time: a simulation runs one device for its whole class.

Devices with one plan may still differ: in their kind, in the links of their communications, or
because a peer differs. ``timing_classes`` separates devices only as far as their times can differ,
so a thousand equal replicas are one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from piper.cost.cluster import Cluster
from piper.cost.link_time import Way
from piper.ir.dag.dag import Dag
from piper.ir.dag.ragged import numbered
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.grouped import grouped
from piper.ir.ops import Collective, Group, Transfer
from piper.ir.plan.columns import VERBS, Columns
from piper.ir.plan.instances import Participants, instances, members
from piper.ir.plan.instructions import Verb
from piper.ir.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class CollectiveInstance:
    """One instance of a communication: the devices that communicate with each other."""

    participants: Participants
    devices: Group
    way: Way


@dataclass(frozen=True, slots=True)
class Pattern:
    """The instances of one communication, and the instance of each device and verb."""

    instances: tuple[CollectiveInstance, ...]
    of: dict[tuple[int, Verb], int]


@dataclass(frozen=True, slots=True)
class TimingClass:
    """Devices with equal times for all instructions."""

    devices: Group
    plan: int
    """The index of their plan."""


@dataclass(frozen=True)
class TimingClasses:
    """All timing classes of a program on a cluster."""

    classes: tuple[TimingClass, ...]
    patterns: Patterns

    @cached_property
    def _of(self) -> dict[int, int]:
        return {device: i for i, one in enumerate(self.classes) for device in one.devices}

    def instance(
        self, number: int, verb: Verb, op: Transfer | Collective
    ) -> tuple[frozenset[tuple[int, Verb]], CollectiveInstance]:
        """The classes that take part in a communication of class ``number``, itself included, each
        with its verb; and its instance."""
        pattern = self.patterns.of(op)
        own = pattern.instances[pattern.of[self.classes[number].devices[0], verb]]
        return frozenset((self._of[d], verb) for d, verb in own.participants), own


class Patterns:
    """The patterns of communications on a cluster; communications of the same groups share one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[int, ...], Pattern] = {}
        self._numbers: EqualNumbers[Group | tuple[Group, ...]] = EqualNumbers()

    def of(self, op: Transfer | Collective) -> Pattern:
        number = self._numbers.of
        key: tuple[int, ...] = ()
        if isinstance(op, Transfer):
            key = number(op.source), number(op.target), *op.replicas
        else:
            key = (number(op.groups),)
        if key not in self._known:
            made = []
            for participants in instances(op):
                devices = members(participants)
                way = self._cluster.way(devices)
                made.append(CollectiveInstance(participants, devices, way))
            of = {end: i for i, instance in enumerate(made) for end in instance.participants}
            self._known[key] = Pattern(tuple(made), of)
        return self._known[key]


class PlanKinds:
    """The instructions of a plan by kind: those of one kind have one verb, and nodes of one kind.
    They are read from columns, so that no instruction is made."""

    def __init__(self, plan: Plan, dag: Dag) -> None:
        self.columns = Columns.of(plan.instructions)
        verbs, nodes = self.columns.verbs, self.columns.nodes
        kinds, first = numbered(dag.kinds.of[nodes] * len(VERBS) + verbs)
        self.of: list[int] = kinds.tolist()
        """The kind of each instruction."""
        self.examples = [(VERBS[verbs[pc]], dag.nodes[nodes[pc]]) for pc in first.tolist()]
        """The verb and a node of each kind, in the order in which kinds first occur."""


def timing_classes(
    plans: Sequence[Plan], kinds: Sequence[PlanKinds], cluster: Cluster, *, apart: bool = False
) -> TimingClasses:
    """The classes of ``plans``, which have ``kinds``, on ``cluster``: the coarsest partition in
    which the devices of a class have the same plan, kind and links, and communicate with the same
    classes. With ``apart`` every device is its own class."""
    patterns = Patterns(cluster)
    mine = [_patterns(one, patterns) for one in kinds]
    plan_of = {d: i for i, plan in enumerate(plans) for d in plan.devices}
    hardware = {d: d if apart else id(cluster.device(d)) for d in plan_of}
    colour = _numbered({d: (p, hardware[d]) for d, p in plan_of.items()})
    while True:
        seen: dict[int, tuple[object, ...]] = {}
        marks: dict[tuple[int, int], int] = {}
        distinct: dict[tuple[object, ...], int] = {}
        for device, plan in plan_of.items():
            signature: list[object] = [colour[device]]
            for pattern, verb in mine[plan]:
                number = pattern.of[device, verb]
                key = id(pattern), number
                if key not in marks:
                    one = pattern.instances[number]
                    participants = sorted((colour[d], v.value) for d, v in one.participants)
                    marks[key] = distinct.setdefault((one.way, *participants), len(distinct))
                signature.append(marks[key])
            seen[device] = tuple(signature)
        finer = _numbered(seen)
        if len(set(finer.values())) == len(set(colour.values())):
            break
        colour = finer
    same = grouped((colour[device], device) for device in sorted(plan_of)).values()
    classes = tuple(TimingClass(tuple(devices), plan_of[devices[0]]) for devices in same)
    return TimingClasses(classes, patterns)


def _patterns(kinds: PlanKinds, patterns: Patterns) -> list[tuple[Pattern, Verb]]:
    """The patterns that a plan takes part in, each with its verb."""
    distinct: dict[tuple[int, Verb], tuple[Pattern, Verb]] = {}
    for verb, node in kinds.examples:
        if isinstance(node.op, Transfer | Collective):
            pattern = patterns.of(node.op)
            distinct.setdefault((id(pattern), verb), (pattern, verb))
    return list(distinct.values())


def _numbered(marks: dict[int, tuple[object, ...]]) -> dict[int, int]:
    """Numbers for marks; equal marks get equal numbers."""
    numbers: dict[tuple[object, ...], int] = {}
    return {device: numbers.setdefault(mark, len(numbers)) for device, mark in marks.items()}
