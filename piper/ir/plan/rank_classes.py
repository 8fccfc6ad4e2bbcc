"""Rank equivalence classes: the devices of one class take part in the same nodes and run one plan,
each with its own rank.

The cost of passes over classes does not depend on the number of devices in a class.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from piper.ir.dag.dag import Dag
from piper.ir.ops import Group, Transfer


@dataclass(frozen=True, slots=True)
class RankClasses:
    """``of``: the class of each device. ``members``: the devices of each class, in order."""

    of: dict[int, int]
    members: tuple[Group, ...]

    def touched(self, devices: Group) -> tuple[int, ...]:
        """The classes that ``devices`` belong to."""
        return tuple(dict.fromkeys(self.of[device] for device in devices))


def rank_classes(dag: Dag) -> RankClasses:
    """The coarsest partition in which every node contains a class wholly or not at all, and the
    replicas of a node are in different classes."""
    groups: dict[tuple[tuple[Group, int], ...], int] = {}
    seen: set[tuple[int, ...]] = set()
    for node in dag.nodes:
        sides: tuple[tuple[Group, int], ...] = ((node.devices, node.replicas),)
        if isinstance(node.op, Transfer):
            sides = tuple(zip((node.op.source, node.op.target), node.op.replicas, strict=True))
        key = tuple(x for group, replicas in sides for x in (id(group), replicas))
        if key in seen:
            continue
        seen.add(key)
        groups.setdefault(sides, len(groups))
    marks: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for sides, number in groups.items():
        for side, (group, replicas) in enumerate(sides):
            for rank, device in enumerate(group):
                marks[device].append((number, side, rank % replicas))
    same: dict[tuple[tuple[int, int, int], ...], list[int]] = {}
    for device in sorted(marks):
        same.setdefault(tuple(marks[device]), []).append(device)
    members = tuple(tuple(devices) for devices in same.values())
    return RankClasses({d: i for i, devices in enumerate(members) for d in devices}, members)
