"""The data-parallel replicas of a strategy, and the strategy with its microbatches dealt anew.

    dp=3, 2 microbatches     [0 1 2] [3 4 5]        the rows of device r: one number each
    dealt [3, 2, 1]          0: 0 2 5    1: 1 4    2: 3

The batch is split further, so that each part has the rows that one replica computed of one
microbatch. All computations keep their shapes, and random numbers, which depend on the number of
the rows, stay the same: the step is equal up to reduction order.
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
from piper.strategies.replicas.longer import Groups, Longer, longer
from piper.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a strategy."""

    strategy: Strategy
    places: tuple[Place, ...]
    count: int
    each: int
    """How many neighbours along the batch form one replica."""
    name: str
    """Of the microbatches."""
    microbatches: int

    @staticmethod
    def of(strategy: Strategy) -> Replicas:
        """The replicas of ``strategy``, or a DirectiveError that says why there are not several."""
        places = tuple(d for d in strategy.directives if isinstance(d, Place))
        sizes = {place.parts for place in places}
        if len(sizes) != 1:
            raise DirectiveError("its regions are placed on groups of different sizes")
        (parts,) = sizes
        each = math.lcm(*(_together(d, place) for d in strategy.directives for place in places))
        if parts == 1:
            raise DirectiveError("there is only one, or each has microbatches of its own")
        if parts % each or parts == each:
            raise DirectiveError(
                "one replica alone does not have all of the experts, or of the state that within= "
                "shards"
            )
        splits = [d for d in strategy.directives if isinstance(d, Split)]
        name, microbatches = (splits[0].into, splits[0].parts) if splits else ("MB", 1)
        replicas = Replicas(strategy, places, parts // each, each, name, microbatches)
        if len({d for row in replicas.devices for d in row}) < sum(map(len, replicas.devices)):
            raise DirectiveError("a device is in several replicas")
        return replicas

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each replica, in corresponding order."""
        made = []
        for r in range(self.count):
            rows = [_devices(p)[self._cut(p, r, r + 1)] for p in self.places]
            made.append(tuple(dict.fromkeys(d for row in rows for d in row)))
        return tuple(made)

    def dealt(self, shares: Sequence[int], size: int = 1) -> Strategy:
        """The strategy in which group g of ``size`` neighbouring replicas, which split the rows of
        a part, computes ``shares[g]`` parts."""
        again = _Again(self, shares)
        total = sum(shares)
        made: list[Directive] = []
        split = any(isinstance(d, Split) for d in self.strategy.directives)
        for directive in self.strategy.directives:
            if isinstance(directive, Place) and not split:
                split = True
                made.append(Split({}, self.name, total))
            if isinstance(directive, Split):
                made.append(replace(directive, parts=total))
            elif isinstance(directive, Place):
                for g in range(len(shares)):
                    if (place := again.place(directive, g)) is not None:
                        made.append(self._on(place, g * size, size))
            elif isinstance(directive, Order):
                made += again.orders(directive)
            elif isinstance(directive, Replicate) and directive.devices is not None:
                end = len(shares) * size
                left_out = [d for p in self.places for d in _devices(p)[self._cut(p, end)]]
                left = tuple(d for d in directive.devices if d not in left_out)
                made.append(replace(directive, devices=left))
            else:
                made.append(again.filtered(directive))
        return Strategy(made)

    def _cut(self, place: Place, first: int, end: int | None = None) -> slice:
        """Where a place has the devices of the replicas from ``first`` to ``end``."""
        size = self.each * place.replicas
        return slice(first * size, None if end is None else end * size)

    def _on(self, place: Place, first: int, size: int) -> Place:
        """``place`` on ``size`` replicas from ``first`` on."""
        devices = _devices(place)[self._cut(place, first, first + size)]
        if place.mesh is None:
            return replace(place, devices=devices)
        outer = place.batch or tuple(place.axes or ())
        if len(outer) > 1:
            raise DirectiveError(f"the rows are split along several axes, {', '.join(outer)}")
        axes = {name: size * self.each if name in outer else n for name, n in place.mesh.axes}
        return replace(place, devices=devices, axes=axes)


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


def round_robin(shares: Sequence[int]) -> list[list[int]]:
    """The parts of each group, which has as many as ``shares`` say: at any time each has had about
    the same fraction of its own."""
    turns = sorted(((i + 0.5) / n, group) for group, n in enumerate(shares) for i in range(n))
    made: list[list[int]] = [[] for _ in shares]
    for part, (_, group) in enumerate(turns):
        made[group].append(part)
    return made


class _Again:
    """What happens to the microbatches of a strategy."""

    def __init__(self, replicas: Replicas, shares: Sequence[int]) -> None:
        directives = replicas.strategy.directives
        self._name = replicas.name
        homes: dict[tuple[bool, ...], list[int]] = {}
        for m in range(replicas.microbatches):
            on = tuple(self._accepts(p.where, m) for p in replicas.places)
            homes.setdefault(on, []).append(m)
        orders = [d for d in directives if isinstance(d, Order)]
        self._rows = {id(d): i for i, d in enumerate(orders)}
        self._stage = ""
        given = [self._actions(d) for d in orders]
        known = {n: longer(given, list(homes.values()), n) for n in set(shares)}
        self._longer: list[Longer] = [known[n] for n in shares]
        self._parts = round_robin(shares)

    def place(self, place: Place, group: int) -> Place | None:
        """``place`` for the parts of one group, if it has any of them."""
        if len(self._parts) == 1:
            return self.filtered(place)
        where = self._where(place.where, [group])
        return replace(place, where=where) if where[self._name] else None

    def filtered(self, directive: Any) -> Any:
        """``directive`` with a filter on the parts, if its own is on microbatches."""
        where = getattr(directive, "where", None)
        if not isinstance(where, Mapping) or where.get(self._name, "*") in ("*", "-"):
            return directive
        return replace(directive, where=self._where(where, range(len(self._parts))))

    def orders(self, directive: Order) -> list[Order]:
        """The order of each group."""
        row = self._rows[id(directive)]
        made = []
        for like, parts in zip(self._longer, self._parts, strict=True):
            filters = [
                [
                    {self._stage: a.stage, self._name: parts[a.microbatch], PASS: a.which.value}
                    for a in actions
                ]
                for actions in like.rows[row]
            ]
            made.append(order(*filters))
        return made

    def _where(self, where: Mapping[str, Any], groups: Sequence[int]) -> dict[str, Any]:
        parts = [
            part
            for group in groups
            for part, like in zip(self._parts[group], self._longer[group].like, strict=True)
            if self._accepts(where, like)
        ]
        return {**where, self._name: sorted(parts)}

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
                    raise DirectiveError(
                        f"{directive} does not name each pass by its stage, {self._name} and PASS, "
                        "as those of piper.strategies do"
                    )
                self._stage = stages[0]
                actions.append(Action(where[stages[0]], Pass[where[PASS]], where[self._name]))
            made.append(tuple(actions))
        return made
