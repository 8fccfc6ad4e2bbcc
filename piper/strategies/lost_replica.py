"""The strategy without one data-parallel replica: its rows go to the others.

    dp=3, 2 microbatches     [0 1 2] [3 4 5]        the rows of device r: one number each
    without a replica        0: 0 2 4    1: 1 3 5   or, where they divide, [0 1] [2 3] [4 5]

The batch is split further, so that each part has the rows that one replica computed of one
microbatch. All computations keep their shapes, and random numbers, which depend on the number of
the rows, stay the same: nothing is traced again, and the step is equal up to reduction order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import PASS
from piper.ir.dag.filters import Filter
from piper.ir.passes import Pass
from piper.strategies.action import Action
from piper.strategies.directives import Directive, order
from piper.strategies.directives.order import Order
from piper.strategies.directives.place import Place
from piper.strategies.directives.replicate import Replicate
from piper.strategies.directives.shard import Shard
from piper.strategies.directives.split import Split
from piper.strategies.longer import Groups, Longer, longer
from piper.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Rerouted:
    """A strategy without one replica."""

    strategy: Strategy
    replicas: tuple[tuple[int, ...], ...]
    """The devices of each replica, in corresponding order. The strategy does without the last; if
    another is lost, the last one's devices take its places."""
    parts: tuple[int, int]
    """Over how many devices the rows of a microbatch are split: before, and now."""


def without_replica(strategy: Strategy) -> Rerouted:
    """``strategy`` without its last replica, or a DirectiveError that says why it has none to
    lose."""
    places = [d for d in strategy.directives if isinstance(d, Place)]
    sizes = {place.parts for place in places}
    if len(sizes) != 1:
        raise _refused("its regions are placed on groups of different sizes")
    (parts,) = sizes
    each = math.lcm(*(_together(d, place) for d in strategy.directives for place in places))
    if parts == 1:
        raise _refused("there is only one")
    if parts % each or parts == each:
        raise _refused(
            "one replica alone does not have all of the experts, or of the state that within= "
            "shards"
        )
    count = parts // each
    splits = [d for d in strategy.directives if isinstance(d, Split)]
    name, microbatches = (splits[0].into, splits[0].parts) if splits else ("MB", 1)
    shared = math.gcd(microbatches, count - 1)
    groups = (count - 1) // shared  # each of ``shared`` replicas, which split a part's rows
    total = microbatches * count // shared
    again = _Again(strategy, places, name, microbatches, -(-total // groups), groups, total)
    made: list[Directive] = []
    for directive in strategy.directives:
        if isinstance(directive, Place) and not splits:
            splits.append(Split({}, name, total))
            made.append(splits[0])
        if isinstance(directive, Split):
            made.append(replace(directive, parts=total))
        elif isinstance(directive, Place):
            made += [_on(again.place(directive, j), j, shared, each) for j in range(groups)]
        elif isinstance(directive, Order):
            made += again.orders(directive)
        elif isinstance(directive, Replicate) and directive.devices is not None:
            lost = {d for place in places for d in _devices(place)[-each * place.replicas :]}
            left = tuple(d for d in directive.devices if d not in lost)
            made.append(replace(directive, devices=left))
        else:
            made.append(again.filtered(directive))
    replicas = []
    for r in range(count):
        cuts = [slice(r * each * p.replicas, (r + 1) * each * p.replicas) for p in places]
        rows = [_devices(p)[cut] for p, cut in zip(places, cuts, strict=True)]
        replicas.append(tuple(dict.fromkeys(d for row in rows for d in row)))
    if len({d for row in replicas for d in row}) < sum(map(len, replicas)):
        raise _refused("a device is in several replicas")
    return Rerouted(Strategy(made), tuple(replicas), (parts, shared * each))


def _refused(why: str) -> DirectiveError:
    return DirectiveError(f"this strategy cannot go on without a replica: {why}")


def _together(directive: Directive, place: Place) -> int:
    """How many neighbours along the batch hold one copy of what ``directive`` shards."""
    ways = 1
    if isinstance(directive, Shard) and directive.axis is None:
        ways = directive.ways or len(place.devices)
    elif isinstance(directive, Shard) and directive.axis in (place.batch or place.axes or ()):
        ways = len(place.devices)
    elif isinstance(directive, Replicate) and directive.within is not None:
        ways = directive.within
    return ways // math.gcd(ways, place.replicas)


def _devices(place: Place) -> tuple[int, ...]:
    """The devices, those with the same rows beside one another."""
    return place.devices if place.mesh is None else place.mesh.devices


def _on(place: Place, group: int, replicas: int, each: int) -> Place:
    """``place`` on a group of ``replicas`` replicas, each of ``each`` devices along the batch."""
    size = replicas * each * place.replicas
    devices = _devices(place)[group * size : (group + 1) * size]
    if place.mesh is None:
        return replace(place, devices=devices)
    outer = place.batch or tuple(place.axes or ())
    if len(outer) > 1:
        raise _refused(f"the rows are split along several axes, {', '.join(outer)}")
    axes = {name: replicas * each if name in outer else n for name, n in place.mesh.axes}
    return replace(place, devices=devices, axes=axes)


class _Again:
    """What happens to the microbatches of a strategy."""

    def __init__(
        self,
        strategy: Strategy,
        places: Sequence[Place],
        name: str,
        microbatches: int,
        count: int,
        groups: int,
        total: int,
    ) -> None:
        """``total`` parts instead of ``microbatches`` go round robin to ``groups`` of devices, at
        most ``count`` to each."""
        self._name, self._groups, self._total = name, groups, total
        homes: dict[tuple[bool, ...], list[int]] = {}
        for m in range(microbatches):
            homes.setdefault(tuple(self._accepts(p.where, m) for p in places), []).append(m)
        orders = [d for d in strategy.directives if isinstance(d, Order)]
        self._rows = {id(d): i for i, d in enumerate(orders)}
        self._stage = ""
        given = [self._actions(d) for d in orders]
        self._longer: Longer = longer(given, list(homes.values()), count)

    def place(self, place: Place, group: int) -> Place:
        """``place`` for the parts of one group."""
        if self._groups == 1:
            return self.filtered(place)
        return replace(place, where=self._where(place.where, [group]))

    def filtered(self, directive: Any) -> Any:
        """``directive`` with a filter on the parts, if its own is on microbatches."""
        where = getattr(directive, "where", None)
        if not isinstance(where, Mapping) or where.get(self._name, "*") in ("*", "-"):
            return directive
        return replace(directive, where=self._where(where, range(self._groups)))

    def orders(self, directive: Order) -> list[Order]:
        """The order of each group."""
        row = self._longer.rows[self._rows[id(directive)]]
        made = []
        for group in range(self._groups):
            filters = [
                [
                    {self._stage: a.stage, self._name: part, PASS: a.which.value}
                    for a in actions
                    if (part := self._part(a.microbatch, group)) < self._total
                ]
                for actions in row
            ]
            made.append(order(*(x for x in filters if x)))
        return made

    def _part(self, number: int, group: int) -> int:
        """The part that is the ``number``-th one of ``group``."""
        return number * self._groups + group

    def _where(self, where: Mapping[str, Any], groups: Sequence[int]) -> dict[str, Any]:
        parts = [
            part
            for number, like in enumerate(self._longer.like)
            if self._accepts(where, like)
            for group in groups
            if (part := self._part(number, group)) < self._total
        ]
        return {**where, self._name: parts}

    def _accepts(self, where: Mapping[str, Any], microbatch: int) -> bool:
        terms = {k: v for k, v in where.items() if k == self._name}
        return Filter.of(terms).accepts({self._name: microbatch})

    def _actions(self, directive: Order) -> Groups:
        """The actions that ``directive`` orders, each by its stage, microbatch and pass."""
        made: Groups = []
        for group in directive.groups:
            actions = []
            for where in group:
                stages = [key for key in where if key not in (self._name, PASS)]
                numbers = [where.get(key) for key in (*stages, self._name)]
                if len(stages) != 1 or not all(isinstance(n, int) for n in numbers) or (
                    self._stage not in ("", stages[0]) or where.get(PASS) not in Pass.__members__
                ):  # fmt: skip
                    raise _refused(
                        f"{directive} does not name each pass by its stage, {self._name} and PASS, "
                        "as those of piper.strategies do"
                    )
                self._stage = stages[0]
                actions.append(Action(where[stages[0]], Pass[where[PASS]], where[self._name]))
            made.append(tuple(actions))
        return made
