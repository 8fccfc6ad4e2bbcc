"""A schedule for more microbatches, in the manner of the given one.

    0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3              two more, each like microbatch 1
    0F0 0F1 0B0 0F1'0B1 0F1"0B1'0F2 0B1"0F3 0B2 0B3

Every further microbatch does what one of the given ones does, later. All passes of a microbatch
move by the same time, so that data flow still agrees with the order on every rank, whatever the
schedule. The place of insertion is the one with the shortest step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from piper.ir.passes import Pass
from piper.strategies.action import Action
from piper.strategies.builder import Row, Schedule
from piper.strategies.timing import timed

_CHOICES = 16
"""The most places of insertion that are compared."""

Groups = list[tuple[Action, ...]]
"""The actions of one rank, as in ``Row``."""


@dataclass(frozen=True, slots=True)
class Longer:
    """A longer schedule."""

    like: tuple[int, ...]
    """For each microbatch, the one of the given schedule that it is like."""
    rows: tuple[Groups, ...]


def longer(rows: Sequence[Groups], homes: Sequence[Sequence[int]], count: int) -> Longer:
    """The schedule of ``rows`` for ``count`` microbatches. Those in one list of ``homes`` run on
    the same ranks; each list grows in proportion."""
    length = sum(map(len, homes))
    ends = [-(-count * done // length) for done in _sums(map(len, homes))]
    sizes = [after - before for before, after in zip([0, *ends], ends, strict=False)]
    if not rows:
        return Longer(tuple(sorted(m for h, n in zip(homes, sizes, strict=True)
                                   for m in _like(h, n, len(h) // 2))), ())  # fmt: skip
    tries = sorted({i / _CHOICES for i in range(_CHOICES)}, key=lambda at: abs(at - 0.5))
    given = _schedule(rows)
    cells = timed(given).cells
    busy = max(sum(cell.busy for cell in row) for row in cells)
    starts = [[cell.start for cell in row] for row in cells]
    best: tuple[float, Longer] | None = None
    for at in tries:
        made = _moved(rows, starts, homes, sizes, busy, at)
        seconds = max(row[-1].end for row in timed(_schedule(made.rows)).cells)
        if best is None or seconds < best[0]:
            best = seconds, made
    assert best is not None
    return best[1]


def _sums(lengths: map[int]) -> list[int]:
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums[1:]


def _like(home: Sequence[int], count: int, at: int) -> list[int]:
    """The microbatches that ``count`` ones of ``home`` are like: more, or fewer, like that in
    position ``at``."""
    if count <= len(home):
        return list(home[:count])
    return [*home[:at], *[home[at]] * (count - len(home) + 1), *home[at + 1 :]]


def _moved(
    rows: Sequence[Groups],
    starts: Sequence[Sequence[float]],
    homes: Sequence[Sequence[int]],
    sizes: Sequence[int],
    busy: float,
    at: float,
) -> Longer:
    """The schedule with further microbatches inserted at the fraction ``at`` of each home."""
    moved: list[tuple[int, float]] = []  # what each microbatch is like, and how much later
    for home, size in zip(homes, sizes, strict=True):
        each, place = busy / len(home), int(at * len(home))
        more = max(0, size - len(home))
        for i, like in enumerate(_like(home, size, place)):
            moved.append((like, each * min(max(0, i - place), more)))
    moved.sort()
    copies: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for number, (like, later) in enumerate(moved):
        copies[like].append((number, later))
    made = []
    for row, times in zip(rows, starts, strict=True):
        groups: defaultdict[tuple[float, int], list[Action]] = defaultdict(list)
        for i, group in enumerate(row):
            for action in group:
                for number, later in copies[action.microbatch]:
                    groups[times[i] + later, i].append(action._replace(microbatch=number))
        made.append([tuple(groups[key]) for key in sorted(groups)])
    return Longer(tuple(like for like, _ in moved), tuple(made))


def _schedule(rows: Sequence[Groups]) -> Schedule:
    """The schedule of ``rows``; refuses one that leaves passes undone."""
    made = []
    for groups in rows:
        stages: defaultdict[int, dict[int, None]] = defaultdict(dict)
        for action in (a for group in groups for a in group if a.which is Pass.F):
            stages[action.stage][action.microbatch] = None
        made.append(Row({stage: sorted(numbers) for stage, numbers in stages.items()}))
        for group in groups:
            made[-1].run(*group)
    count = len({a.microbatch for groups in rows for group in groups for a in group})
    return Schedule("the order", count, made)
