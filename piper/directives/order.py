"""``order``: runs groups of nodes one after another on their devices.

    order([{"PP": 1, "MB": 0, "PASS": "F"}],                      F0 ─▶ ┌ F1 ┐ ─▶ B1
          [{"PP": 1, "MB": 1, "PASS": "F"},                             └ B0 ┘
           {"PP": 1, "MB": 0, "PASS": "B"}],                            overlap
          [{"PP": 1, "MB": 1, "PASS": "B"}])

Filters in one group overlap: nothing orders their nodes against each other. A filter on BI or BW
divides the backwards it matches.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from piper.capture.program import Pass
from piper.directives.base import Directive
from piper.errors import DirectiveError
from piper.ir.dag import PASS, Dag, Group, Node
from piper.ir.filters import Filter, FilterLike, select
from piper.ir.text import name_of

_HALVES = (Pass.BI, Pass.BW)


@dataclass(frozen=True)
class Order(Directive):
    name: ClassVar[str] = "order"

    groups: tuple[tuple[FilterLike, ...], ...]

    def rewrite(self, dag: Dag, me: int) -> Dag:
        filters = [[Filter.of(where) for where in group] for group in self.groups]
        dag = _divide(dag, [f for group in filters for f in group], me)
        finder = _Finder(dag)
        after: defaultdict[int, set[int]] = defaultdict(set)
        last: dict[Group, list[int]] = {}
        seen: dict[int, Filter] = {}
        for group in filters:
            ends: defaultdict[Group, list[int]] = defaultdict(list)
            for where in group:
                for devices, row in finder.rows(where).items():
                    for number in row:
                        if number in seen:
                            raise DirectiveError(
                                f"{name_of(dag, number)} is ordered twice: by {seen[number]} and "
                                f"again by {where}"
                            )
                        seen[number] = where
                    for before, number in itertools.pairwise(row):
                        if not finder.feeds(before, number):
                            after[number].add(before)
                    after[row[0]].update(last.get(devices, ()))
                    ends[devices].append(row[-1])
            last.update(ends)
        changed = {
            number: replace(
                dag.nodes[number],
                after=tuple(sorted({*dag.nodes[number].after, *befores})),
                made_by=me,
            )
            for number, befores in after.items()
            if befores
        }
        return dag.with_nodes(changed)

    def to_json(self) -> dict[str, Any]:
        return {"op": self.name, "filters": [[dict(f) for f in group] for group in self.groups]}

    def __str__(self) -> str:
        groups = [f"[{', '.join(str(Filter.of(f)) for f in group)}]" for group in self.groups]
        return f"order({', '.join(groups)})"


class _Finder:
    """Finds the nodes of many filters on the same tags without looking at all nodes each time."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self._indices: dict[tuple[str, ...], dict[tuple[object, ...], list[int]]] = {}

    def rows(self, where: Filter) -> Mapping[Group, list[int]]:
        """The matched nodes of each group of devices, in an order that follows the data."""
        numbers = self._matching(where)
        rows: defaultdict[Group, list[int]] = defaultdict(list)
        for number in numbers:
            node = self._dag.nodes[number]
            if not node.devices:
                raise DirectiveError(
                    f"{name_of(self._dag, number)} is not placed yet: place it before ordering it"
                )
            rows[node.devices].append(number)
        for row in rows.values():
            row.sort(key=lambda number: _natural(self._dag.nodes[number]))
        return rows

    def feeds(self, before: int, number: int) -> bool:
        """Whether ``number`` reads what ``before`` makes, so that no order is needed."""
        nodes = self._dag.nodes
        return not set(nodes[before].writes).isdisjoint(nodes[number].reads)

    def _matching(self, where: Filter) -> list[int]:
        exact = [t for t in where.terms if t.values is not None and len(t.values) == 1]
        if len(exact) < len(where.terms) or not exact:
            return select(self._dag, where)
        names = tuple(term.name for term in exact)
        if names not in self._indices:
            index: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
            for number, node in enumerate(self._dag.nodes):
                index[tuple(node.tags.get(name) for name in names)].append(number)
            self._indices[names] = index
        key = tuple(next(iter(term.values or ())) for term in exact)
        found = self._indices[names].get(key, [])
        if found or any(term.name == PASS and key[i] in _HALVES for i, term in enumerate(exact)):
            return found  # a half of a backward may have nothing to compute
        return select(self._dag, where)  # which says what is wrong


def _natural(node: Node) -> tuple[int, int]:
    """Microbatch by microbatch; forwards from the first chunk on, backwards from the last."""
    chunk = node.op.chunk
    return node.op.microbatch, chunk if node.op.which is Pass.F else -chunk


def _divide(dag: Dag, filters: Sequence[Filter], me: int) -> Dag:
    """``dag`` with every backward that some filter wants in halves divided into BI and BW."""
    wanted: set[int] = set()
    for where in filters:
        terms = {term.name: term for term in where.terms}
        halves = terms.get(PASS)
        if halves is None or halves.values is None or not halves.values.intersection(_HALVES):
            continue
        rest = Filter(tuple(term for term in where.terms if term.name != PASS))
        for number, node in enumerate(dag.nodes):
            if node.op.which is Pass.B and rest.accepts(node.tags):
                wanted.add(number)
    if not wanted:
        return dag
    if any(node.after for node in dag.nodes):
        moved = _renumbering(dag, wanted)
    else:
        moved = {}
    nodes: list[Node] = []
    for number, node in enumerate(dag.nodes):
        after = tuple(moved.get(b, b) for b in node.after)
        if number in wanted:
            nodes.extend(_halves(dag, replace(node, after=after), me))
        else:
            nodes.append(replace(node, after=after) if after else node)
    return replace(dag, nodes=tuple(nodes))


def _renumbering(dag: Dag, wanted: set[int]) -> dict[int, int]:
    """Where each node moves when those ``wanted`` become two; both halves count as the last."""
    moved: dict[int, int] = {}
    place = 0
    for number, node in enumerate(dag.nodes):
        place += len(_passes(dag, node)) if number in wanted else 1
        moved[number] = place - 1
    return moved


def _passes(dag: Dag, node: Node) -> list[Pass]:
    chunk = dag.model.chunks[node.op.chunk]
    return [p for p in _HALVES if p in chunk.variants[dag.policy(chunk.index)].passes]


def _halves(dag: Dag, node: Node, me: int) -> list[Node]:
    made = []
    for which in _passes(dag, node):
        op = replace(node.op, which=which)
        reads, writes = dag.table.wire(op.chunk, which, dag.policy(op.chunk), op.microbatch)
        tags = {**node.tags, PASS: which}
        made.append(replace(node, op=op, tags=tags, reads=reads, writes=writes, made_by=me))
    return made


def order(*groups: Sequence[FilterLike] | FilterLike) -> Order:
    """Run the groups one after another on their devices; filters inside one group overlap."""
    rows = [(group,) if isinstance(group, Mapping) else tuple(group) for group in groups]
    return Order(tuple(tuple(dict(where) for where in row) for row in rows))
