"""Time a schedule with fixed pass lengths and free communication, as the literature draws and
compares schedules: its duration, bubble and activations.

A pair is one block: it starts when both passes can, takes the sum of both, and its outputs are
available when it ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from piper.base.errors import DirectiveError
from piper.ir.passes import Pass
from piper.strategies.action import Action
from piper.view.grid import Cell, Grid, GridLine


class RankRow(Protocol):
    """The actions of one pipeline rank: groups of actions that overlap."""

    @property
    def groups(self) -> Sequence[tuple[Action, ...]]: ...


class TimedSchedule(Protocol):
    """The part of a schedule that timing reads."""

    @property
    def name(self) -> str: ...
    @property
    def stages(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def rows(self) -> Sequence[RankRow]: ...
    def check(self) -> None: ...


@dataclass(frozen=True)
class Timing:
    """The start and end of every action."""

    schedule: TimedSchedule
    cells: tuple[tuple[Cell, ...], ...]
    """For each rank, its groups in order."""

    @property
    def bubble(self) -> float:
        """The longest idle time of any rank between its first and its last pass."""
        return max(
            row[-1].end - row[0].start - sum(cell.busy for cell in row) for row in self.cells
        )

    @property
    def activations(self) -> tuple[int, ...]:
        """For each rank, the peak number of (stage, microbatch) pairs whose activations it holds.
        A pair is held from the start of its forward to the end of its last backward."""
        peaks = []
        for row in self.schedule.rows:
            live = peak = 0
            for group in row.groups:
                live += sum(action.which is Pass.F for action in group)
                peak = max(peak, live)
                live -= sum(action.which in (Pass.B, Pass.BW) for action in group)
            peaks.append(peak)
        return tuple(peaks)

    @property
    def grid(self) -> Grid:
        """The drawing."""
        schedule = self.schedule
        title = (
            f"{schedule.name}: {schedule.stages} stages on {schedule.ranks} ranks, "
            f"{schedule.microbatches} microbatches; bubble {round(self.bubble, 9):g}, "
            f"activations {max(self.activations)}"
        )
        lines = (GridLine(f"rank {rank}", row) for rank, row in enumerate(self.cells))
        return Grid(title, tuple(lines))

    def __str__(self) -> str:
        return str(self.grid)


def timed(
    schedule: TimedSchedule,
    *,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    backward: float | None = None,
) -> Timing:
    """Time ``schedule`` with these pass lengths. By default a whole backward takes as long as its
    two halves."""
    schedule.check()
    for name, value in (
        ("forward", forward),
        ("backward_input", backward_input),
        ("backward_weight", backward_weight),
        ("backward", 0.0 if backward is None else backward),
    ):
        if not 0 <= value < math.inf:
            raise DirectiveError(f"{name}={value!r} must be a length of time")
    length = {
        Pass.F: forward,
        Pass.B: backward_input + backward_weight if backward is None else backward,
        Pass.BI: backward_input,
        Pass.BW: backward_weight,
    }
    done: dict[Action, float] = {}
    free = [0.0] * schedule.ranks
    cells: list[list[Cell]] = [[] for _ in schedule.rows]
    left = sum(len(row.groups) for row in schedule.rows)
    stages = schedule.stages
    while left:
        before = left
        for rank, row in enumerate(schedule.rows):
            while len(cells[rank]) < len(row.groups):
                group = row.groups[len(cells[rank])]
                needs = [
                    ways
                    for action in group
                    for ways in _needs(action, stages)
                    if not set(ways).intersection(group)
                ]
                if not all(any(way in done for way in ways) for ways in needs):
                    break
                ready = [done[way] for ways in needs for way in ways if way in done]
                start = max([free[rank], *ready])
                free[rank] = start + sum(length[action.which] for action in group)
                done.update(dict.fromkeys(group, free[rank]))
                labels, passes = tuple(map(str, group)), tuple(a.which for a in group)
                cells[rank].append(Cell(start, free[rank], labels, passes, free[rank] - start))
                left -= 1
        if left == before:
            stuck = [
                f"  rank {rank} at {' and '.join(map(str, row.groups[len(cells[rank])]))}"
                for rank, row in enumerate(schedule.rows)
                if len(cells[rank]) < len(row.groups)
            ]
            raise DirectiveError("\n".join([f"{schedule.name} cannot continue:", *stuck]))
    return Timing(schedule, tuple(map(tuple, cells)))


def _needs(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """The actions that must finish before ``action``; one alternative of each entry is enough."""
    stage, which, microbatch = action
    if which is Pass.F:
        return [(Action(stage - 1, Pass.F, microbatch),)] if stage else []
    if which is Pass.BW:
        return [(Action(stage, Pass.BI, microbatch),)]
    needs: list[tuple[Action, ...]] = [(Action(stage, Pass.F, microbatch),)]
    if stage < stages - 1:
        ways = (Pass.B, Pass.BI)
        needs.append(tuple(Action(stage + 1, way, microbatch) for way in ways))
    return needs
