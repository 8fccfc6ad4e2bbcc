"""``order``: run groups of nodes one after another on their devices.

    order([{"PP": 1, "MB": 0, "PASS": "F"}],                      F0 ─▶ ┌ F1 ┐ ─▶ B1
          [{"PP": 1, "MB": 1, "PASS": "F"},                             └ B0 ┘
           {"PP": 1, "MB": 0, "PASS": "B"}],                            overlap
          [{"PP": 1, "MB": 1, "PASS": "B"}])

The nodes of different filters in one group may overlap: the order leaves them open. A filter on BI
or BW splits the backwards that it matches.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from msgspec import structs

from piper.base.arguments import named_arguments
from piper.base.errors import DirectiveError
from piper.ir.dag.dag import PASS, Dag, Node, Tags, name_of
from piper.ir.dag.filters import Filter, FilterLike, TagIndex, Term, select
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.ops import Compute, Group
from piper.ir.passes import Pass
from piper.strategies.crossing import natural, refuse_crossing
from piper.strategies.directives.directive import Directive, plain_filter

_Entries = Sequence[tuple[int, list[list[Filter]]]]
"""Of each directive, its entry in the history and the filters of its groups."""
_Flow = tuple[list[int], list[tuple[int, int]]]
"""The order of some nodes, and the consecutive ones between which no data flows, by index."""
_HALVES = (Pass.BI, Pass.BW)


@dataclass(frozen=True)
class Order(Directive):
    name: ClassVar[str] = "order"
    orders: ClassVar[bool] = True

    groups: tuple[tuple[FilterLike, ...], ...]

    def check(self) -> None:
        if not self.groups or not all(self.groups):
            raise DirectiveError("an order is a list of groups, each with at least one filter")

    def rewrite(self, dag: Dag, me: int) -> Dag:
        return apply_orders(dag, [(me, self)])

    @property
    def filters(self) -> list[list[Filter]]:
        """The filters of each group."""
        terms: dict[tuple[str, object], Term] = {}
        return [[Filter.of(where, terms) for where in group] for group in self.groups]

    def to_json(self) -> dict[str, Any]:
        return {"op": self.name, "filters": [[dict(f) for f in group] for group in self.groups]}

    def __str__(self) -> str:
        return f"order({', '.join(str([dict(f) for f in group]) for group in self.groups)})"


def apply_orders(dag: Dag, orders: Iterable[tuple[int, Order]]) -> Dag:
    """``dag`` after ``orders``, each given with its entry in the history. One pass over the nodes
    serves them all: an order usually covers one stage of many."""
    entries = [(me, order.filters) for me, order in orders]
    dag = _divide(dag, entries)
    finder = _Finder(dag, [f for _, groups in entries for group in groups for f in group])
    changed: dict[int, Node] = {}
    for me, groups in entries:
        _add_edges(dag, finder, groups, me, changed)
    return dag.rewired([changed.get(number, node) for number, node in enumerate(dag.nodes)])


def _add_edges(
    dag: Dag, finder: _Finder, groups: list[list[Filter]], me: int, changed: dict[int, Node]
) -> None:
    """Put the nodes with the order edges of one directive into ``changed``."""
    after: defaultdict[int, set[int]] = defaultdict(set)
    last: dict[int, list[int]] = {}
    seen: dict[int, Filter] = {}
    ordered: list[list[int]] = []
    for group in groups:
        ordered.append([])
        ends: defaultdict[int, list[int]] = defaultdict(list)
        for where in group:
            for row in finder.rows(where):
                if not seen.keys().isdisjoint(row.numbers):
                    number = next(number for number in row.numbers if number in seen)
                    raise DirectiveError(
                        f"{name_of(dag, number)} is ordered twice: by {seen[number]} and "
                        f"again by {where}"
                    )
                seen.update(dict.fromkeys(row.numbers, where))
                ordered[-1] += row.numbers
                for before, number in row.apart:
                    after[number].add(before)
                for resource in finder.resources[row.place]:
                    if resource in last:
                        after[row.numbers[0]].update(last[resource])
                    ends[resource].append(row.numbers[-1])
        last.update(ends)
    refuse_crossing(dag, ordered)
    for number in seen:
        node = changed.get(number) or dag.nodes[number]
        if number not in after:
            changed[number] = structs.replace(node, ordered_by=me)
            continue
        befores, by = tuple(sorted(after[number])), (me,) * len(after[number])
        if node.after:
            old = dict(zip(node.after, node.after_by, strict=True))
            edges = sorted({**dict.fromkeys(befores, me), **old}.items())
            befores, by = zip(*edges, strict=True)
        changed[number] = structs.replace(
            node, after=befores, after_by=by, made_by=node.changed_by(me), ordered_by=me
        )


class _Row(NamedTuple):
    """Nodes on one group of devices, in data flow order."""

    place: int
    """The number of the group."""
    numbers: list[int]
    apart: list[tuple[int, int]]
    """Consecutive ones of which the second reads no output of the first, so that an order edge is
    needed."""


class _Finder:
    """Finds the ordered nodes and the devices that they run on."""

    def __init__(self, dag: Dag, filters: Sequence[Filter]) -> None:
        self._dag = dag
        self._index = _index(dag, filters)
        self._flows: dict[tuple[int, ...], _Flow] = {}
        it, most = dag.operations, int(dag.operations.microbatches.max(initial=0))
        self._microbatches: list[int] = it.microbatches.tolist()
        names = (it.chunks * len(Pass) + it.passes) * (2 * most + 1) + it.microbatches
        self._names: list[int] = names.tolist()
        """Numbers for the pass of each node that grow with its microbatch."""
        numbers: EqualNumbers[Group] = EqualNumbers()
        places = np.array([numbers.of(group) for group, _ in dag.operations.groups], np.int64)
        self._places: list[int] = places[dag.operations.places].tolist()
        count = Counter(device for group in numbers.values for device in group)
        self.resources = [
            (-1 - place,) if all(count[d] == 1 for d in group) else group
            for place, group in enumerate(numbers.values)
        ]
        """For each group of devices, the keys that track the order on it: the group as a whole, or
        each device if another group shares some of them."""

    def rows(self, where: Filter) -> list[_Row]:
        """The matched nodes of each group of devices."""
        places = self._places
        matched: defaultdict[int, list[int]] = defaultdict(list)
        for number in self._matching(where):
            matched[places[number]].append(number)
        rows = []
        for place, numbers in matched.items():
            if not self._dag.nodes[numbers[0]].devices:
                raise DirectiveError(
                    f"{name_of(self._dag, numbers[0])} is not placed yet: place it before "
                    "ordering it"
                )
            order, apart = self._flow(numbers)
            pairs = [(numbers[a], numbers[b]) for a, b in apart]
            rows.append(_Row(place, [numbers[i] for i in order], pairs))
        return rows

    def _flow(self, numbers: list[int]) -> _Flow:
        """The data flow order of nodes. The values of a pass follow from its chunk and microbatch,
        so the same passes of other microbatches have the same order."""
        first = self._microbatches[numbers[0]]
        key = tuple([self._names[number] - first for number in numbers])
        if key not in self._flows:
            nodes = [self._dag.nodes[number] for number in numbers]
            order = sorted(range(len(nodes)), key=lambda i: natural(nodes[i]))
            pairs = itertools.pairwise(order)
            apart = [(a, b) for a, b in pairs if set(nodes[a].writes).isdisjoint(nodes[b].reads)]
            self._flows[key] = order, apart
        return self._flows[key]

    def _matching(self, where: Filter) -> list[int]:
        numbers = self._index.matching(where)
        return numbers if numbers or self._may_be_empty(where) else select(self._dag, where)

    def _may_be_empty(self, where: Filter) -> bool:
        """Whether the filter asks for a BI or BW that has nothing to compute: its regions exist,
        but have no gradient of that kind."""
        return _wants_halves(where) and bool(self._index.matching(where.without(PASS)))


def _index(dag: Dag, filters: Sequence[Filter]) -> TagIndex:
    """An index of the nodes that some of ``filters`` may match, preselected by one tag that all
    filters use: a single order may cover one stage of many."""
    asked = [{t.name: t.values for t in where.terms if t.values is not None} for where in filters]
    common = [n for n in asked[0] if n != PASS and all(n in terms for terms in asked)]
    if not common:
        return TagIndex(dag, range(len(dag.nodes)))
    values = {name: frozenset().union(*[terms[name] for terms in asked]) for name in common}
    name = min(common, key=lambda name: len(values[name]))
    wanted = values[name]
    return TagIndex(dag, [i for i, node in enumerate(dag.nodes) if node.tags.get(name) in wanted])


def _wants_halves(where: Filter) -> bool:
    passes = [term.values for term in where.terms if term.name == PASS]
    return bool(passes) and bool((passes[0] or frozenset()).intersection(_HALVES))


def _accepts_whole(where: Filter) -> bool:
    """Whether the filter matches whole backwards, too."""
    return all(term.name != PASS or term.accepts(Pass.B) for term in where.terms)


def _divide(dag: Dag, entries: _Entries) -> Dag:
    """``dag`` with the backwards that filters on BI or BW match split into BI and BW, each by the
    first directive that asks for it."""
    filters = [[f for group in groups for f in group] for _, groups in entries]
    asked = [[where.without(PASS) for where in row if _wants_halves(where)] for row in filters]
    if not any(asked):
        return dag
    index = _index(dag, [f for row in filters for f in row])
    whole: set[int] = {i for i, node in enumerate(dag.nodes) if node.ordered_by}
    wanted: dict[int, int] = {}
    backwards = frozenset(dag.operations.that_run(Pass.B))
    for (me, _), row, wheres in zip(entries, filters, asked, strict=True):
        matched = {number for where in wheres for number in index.matching(where)}
        new = (matched & backwards).difference(wanted)
        _refuse_ordered(dag, whole & new)
        wanted.update(dict.fromkeys(new, me))
        if me != entries[-1][0]:
            named = (index.matching(where) for where in row if _accepts_whole(where))
            whole.update(number for row in named for number in row if number not in wanted)
    if not wanted:
        return dag
    halves_of = [_halves_of(dag, chunk) for chunk in range(len(dag.model.chunks))]
    halves = {number: halves_of[dag.nodes[number].compute.chunk] for number in sorted(wanted)}
    nodes: list[Node] = []
    tags: dict[tuple[int, Pass], Tags] = {}
    lengths = [1] * len(dag.nodes)
    done = 0
    for number, passes in halves.items():
        nodes += dag.nodes[done:number]
        nodes += _halves(dag, dag.nodes[number], passes, wanted[number], tags)
        lengths[number], done = len(passes), number + 1
    nodes += dag.nodes[done:]
    moved = [0, *itertools.accumulate(lengths)]
    for place, node in enumerate(nodes):
        if node.after:
            nodes[place] = structs.replace(node, after=tuple([moved[b] for b in node.after]))
    return dag.divided(nodes, halves)


def _refuse_ordered(dag: Dag, numbers: set[int]) -> None:
    """Refuse to split backwards that are ordered as a whole."""
    for number in sorted(numbers):
        raise DirectiveError(
            f"{name_of(dag, number)} is already ordered as a whole, so it cannot be split "
            "into BI and BW: order its halves in the first order that names it"
        )


def _halves_of(dag: Dag, chunk: int) -> list[Pass]:
    """The passes into which the backward of a chunk is divided."""
    passes = dag.model.chunks[chunk].variants[dag.policy(chunk)].passes
    return [which for which in _HALVES if which in passes]


def _halves(
    dag: Dag, node: Node, halves: Iterable[Pass], me: int, tags: dict[tuple[int, Pass], Tags]
) -> list[Node]:
    """The ``halves`` of a node. ``tags`` has their tags by those of nodes, which segments share."""
    op, by = node.compute, node.changed_by(me)
    policy, made = dag.policy(op.chunk), []
    for which in halves:
        reads, writes = dag.table.wire(op.chunk, which, policy, op.microbatch)
        key = id(node.tags), which
        mine = tags.get(key) or tags.setdefault(key, {**node.tags, PASS: which})
        half = Compute(op.chunk, which, op.microbatch)
        made.append(
            structs.replace(node, op=half, tags=mine, reads=reads, writes=writes, made_by=by)
        )
    return made


@named_arguments(DirectiveError)
def order(*groups: Sequence[FilterLike] | FilterLike) -> Order:
    """Run the groups one after another on their devices; filters inside one group overlap."""
    rows = []
    for group in groups:
        if isinstance(group, str) or not isinstance(group, Sequence | Mapping):
            raise DirectiveError(f"a group of an order is a list of filters, not {group!r}")
        filters = [group] if isinstance(group, Mapping) else list(group)
        rows.append(tuple(plain_filter(where) for where in filters))
    return Order(tuple(rows))
