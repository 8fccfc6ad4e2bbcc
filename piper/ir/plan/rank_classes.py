"""Rank equivalence classes: the devices of one class take part in the same nodes and run one plan,
each with its own rank.

The cost of passes over classes does not depend on the number of devices in a class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.ragged import distinct
from piper.ir.dag.values import Content
from piper.ir.grouped import grouped
from piper.ir.ops import Collective, Compute, Group, Transfer, Update

_Side = tuple[Group, int, tuple[tuple[int, int], ...]]
"""A group, how many adjacent devices have different roles, and the strides and ways of the axes
along which devices have one role."""


@dataclass(frozen=True, slots=True)
class RankClasses:
    """``of``: the class of each device. ``members``: the devices of each class, in order."""

    of: dict[int, int]
    members: tuple[Group, ...]

    def touched(self, devices: Group) -> tuple[int, ...]:
        """The classes that ``devices`` belong to."""
        return tuple(dict.fromkeys(map(self.of.__getitem__, devices)))


def takes_every_copy(dag: Dag, node: Node) -> bool:
    """Whether a reduction or an update takes every equal copy of gradients: it sums each copy
    separately, or they are sums already. Others count the first copy."""
    if isinstance(node.op, Update):
        return True
    extra = dag.extra[node.writes[0] - dag.first_extra]
    if extra.content is Content.GRADIENTS:
        return dag.buckets[extra.of].alike > 1
    return extra.content is Content.NORM


def rank_classes(dag: Dag) -> RankClasses:
    """The coarsest partition in which every node contains a class wholly or not at all, and all
    devices of a class have the same role in it: they count a copy of its result or not, and send
    and receive the same share of the messages."""
    counted = _counted_once(dag)
    sides_of: dict[tuple[_Side, ...], int] = {}
    seen: set[tuple[object, ...]] = set()
    once = np.zeros(len(dag.nodes), bool)
    once[list(counted)] = True
    for pair in distinct(2 * dag.kinds.of + once).tolist():
        sides = _sides(dag, dag.nodes[dag.kinds.examples[pair // 2]], once=pair % 2 == 1)
        key = tuple((id(group), *roles) for group, *roles in sides)
        if key not in seen:
            seen.add(key)
            sides_of.setdefault(sides, len(sides_of))
    marks: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for sides, number in sides_of.items():
        for side, (group, apart, alike) in enumerate(sides):
            if apart == 1:
                mark = number, side, 0
                for device in group:
                    marks[device].append(mark)
                continue
            for rank, device in enumerate(group):
                role = rank % apart
                for stride, ways in alike:
                    role -= role // stride % ways * stride
                marks[device].append((number, side, min(role, 1) if len(sides) == 1 else role))
    same = grouped((tuple(marks[device]), device) for device in sorted(marks))
    members = tuple(tuple(devices) for devices in same.values())
    return RankClasses({d: i for i, devices in enumerate(members) for d in devices}, members)


def _sides(dag: Dag, node: Node, *, once: bool) -> tuple[_Side, ...]:
    if isinstance(node.op, Transfer):
        ours, theirs = node.op.replicas
        even = ours == theirs  # each copy of the source sends to one of the target
        return (
            (node.op.source, 1 if even else ours, ()),
            (node.op.target, 1 if even else theirs, ()),
        )
    if not once:
        return ((node.devices, 1, ()),)
    rules = dag.sharded_along(node.op.chunk) if isinstance(node.op, Compute) else ()
    return ((node.devices, node.replicas, tuple((rule.stride, rule.ways) for rule in rules)),)


def _counted_once(dag: Dag) -> frozenset[int]:
    """The nodes with several copies of a result, of which one is counted."""
    makers = {dag.maker(value) for value in _values_counted_once(dag)}
    return frozenset(n for n in makers if n is not None and dag.nodes[n].replicas > 1)


def _values_counted_once(dag: Dag) -> Iterator[int]:
    for node in dag.examples:  # others are alone in their kinds
        if isinstance(node.op, Collective) and node.writes[0] >= dag.first_extra:
            content = dag.extra[node.writes[0] - dag.first_extra].content
            if content is not Content.VALUE and not takes_every_copy(dag, node):
                yield from node.reads
    wanted = {of for of in dag.model.outputs if dag.model.values[of].shape}
    for of in wanted:
        yield from dag.activations(of)
