"""The times of all nodes of a step in the simulated execution that ordered the plans.

Printed, it is a grid of the computations: one cell per pass of a stage for one microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from piper.ir.dag.dag import Dag, group_text
from piper.ir.ops import Compute
from piper.ir.passes import Pass
from piper.ir.plan.rank_classes import RankClasses
from piper.view.busy import Exposure, Span, all_to_all
from piper.view.grid import LETTERS, Cell, Grid, GridLine

_Key = tuple[tuple[object, ...], Pass, int]
"""The stage, the pass and the microbatch of a computation."""


@dataclass(frozen=True)
class Timetable:
    """The DAG's nodes, by number, in issue ``order``, and the start and end of each."""

    dag: Dag
    classes: RankClasses
    order: tuple[int, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
    stages: tuple[str, ...]
    """The tags that name a stage."""

    @cached_property
    def grid(self) -> Grid:
        """The computations of each rank equivalence class."""
        lines = (
            GridLine(f"device {group_text(members)}", self._cells(spans))
            for members, spans in zip(self.classes.members, self.spans, strict=True)
        )
        return Grid("", tuple(lines))

    @cached_property
    def spans(self) -> tuple[list[Span], ...]:
        """The nodes of each rank equivalence class, in issue order."""
        spans: tuple[list[Span], ...] = tuple([] for _ in self.classes.members)
        for number in self.order:
            for c in self.classes.touched(self.dag.nodes[number].devices):
                spans[c].append(Span(number, self.start[number], self.end[number]))
        return spans

    @property
    def all_to_all(self) -> Exposure:
        """The exposure of the all-to-all dispatch and combine, summed over all devices."""
        rows = zip(self.classes.members, self.spans, strict=True)
        parts = (all_to_all(self.dag, spans).times(len(members)) for members, spans in rows)
        return sum(parts, start=Exposure(0.0, 0.0))

    def __str__(self) -> str:
        return str(self.grid)

    def _cells(self, spans: Sequence[Span]) -> tuple[Cell, ...]:
        """One cell per stage, pass and microbatch, or per two of them that overlap. If more than
        two overlap, nothing orders them: each then has one cell per uninterrupted run."""
        runs: list[tuple[_Key, Cell]] = []
        whole: dict[_Key, Cell] = {}
        for span in spans:
            key = self._key(span.node)
            if key is None:
                continue
            cell = Cell(span.start, span.end, (_label(key),), (key[1],), span.end - span.start)
            if runs and runs[-1][0] == key:
                runs[-1] = key, _joined(runs[-1][1], cell)
            else:
                runs.append((key, cell))
            whole[key] = _joined(whole[key], cell) if key in whole else cell
        cells: list[Cell] = []
        for keys in _overlapping(whole):
            if len(keys) <= 2:
                first, *other = (whole[key] for key in keys)
                cells.append(_paired(first, other[0]) if other else first)
            else:
                cells += [cell for key, cell in runs if key in keys]
        return tuple(sorted(cells, key=lambda cell: cell.start))

    def _key(self, number: int) -> _Key | None:
        node = self.dag.nodes[number]
        if not isinstance(node.op, Compute):
            return None
        stage = tuple(node.tags[tag] for tag in self.stages if tag in node.tags)
        return stage, node.op.which, node.op.microbatch


def _label(key: _Key) -> str:
    stage, which, microbatch = key
    return f"{'.'.join(map(str, stage))}{LETTERS[which]}{microbatch}"


def _joined(a: Cell, b: Cell) -> Cell:
    """Two pieces of one cell, joined."""
    return replace(a, start=min(a.start, b.start), end=max(a.end, b.end), busy=a.busy + b.busy)


def _paired(a: Cell, b: Cell) -> Cell:
    return replace(_joined(a, b), labels=a.labels + b.labels, passes=a.passes + b.passes)


def _overlapping(cells: Mapping[_Key, Cell]) -> list[list[_Key]]:
    """Groups of keys whose times overlap, directly or through others."""
    groups: list[list[_Key]] = []
    until = float("-inf")
    for key, cell in sorted(cells.items(), key=lambda item: item[1].start):
        if groups and cell.start < until:
            groups[-1].append(key)
        else:
            groups.append([key])
        until = max(until, cell.end)
    return groups
