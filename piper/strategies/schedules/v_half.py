"""V-Half: a V of stages that holds half the activations of 1F1B (Qi et al. 2024).

The schedule repeats a building block: one microbatch's passes at fixed times, every six units
(three passes of two stages). A stage's activations live from its forward to its input pass, so a
rank holds (the sum of its stages' lifetimes) / 6 of them. The block is the shortest in which no
rank has two passes at the same time modulo six.

    lifetimes    (a + d) * ranks after + (b + c) * (ranks - 1 + rank), with a + d = b + c = 3
    a, b         units from one forward to the next, on the way down and up
    c, d         the same for input passes

bubble       that of the block: from four fifths (2 ranks) to three fifths (8) of 1F1B's
activations  about ranks microbatches of half a rank's layers: half of 1F1B
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from piper.base.errors import DirectiveError
from piper.strategies.builder import Schedule, folded

PERIOD = 6


@dataclass(frozen=True, slots=True)
class BuildingBlock:
    """The times of one microbatch's passes. ``steps``: units between adjacent ranks on each of the
    four ways through the ranks. ``turns``: units between one way and the next."""

    ranks: int
    steps: tuple[int, int, int, int]
    turns: tuple[int, ...]

    def times(self, rank: int) -> tuple[int, int, int, int]:
        """The times of a rank's near forward, far forward, far input and near input passes."""
        last = self.ranks - 1
        down, up, back, home = self.steps
        near = down * rank
        far = down * last + self.turns[0] + up * (last - rank)
        far_input = down * last + self.turns[0] + up * last + self.turns[1] + back * rank
        turn = down * last + self.turns[0] + up * last + self.turns[1] + back * last
        return near, far, far_input, turn + self.turns[2] + home * (last - rank)

    def fits(self) -> bool:
        """Whether no rank has two passes at one time when the block repeats."""
        rows = ([t % PERIOD for t in self.times(rank)] for rank in range(self.ranks))
        return all(len(set(row)) == len(row) for row in rows)


def block(ranks: int, lifetime: int) -> BuildingBlock:
    """The shortest block with down + home = up + back = ``lifetime`` units per step."""
    halves = [(n, lifetime - n) for n in range(1, lifetime)]
    candidates = [
        BuildingBlock(ranks, (down, up, back, home), turns)
        for (down, home), (up, back) in itertools.product(halves, halves)
        for turns in itertools.product(range(1, PERIOD + 1), repeat=3)
    ]
    fitting = [b for b in candidates if b.fits()]
    if not fitting:
        raise DirectiveError(f"no V of {ranks} ranks fits a lifetime of {lifetime}")
    return min(fitting, key=lambda b: b.times(0)[3])


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Any number of microbatches."""
    schedule = folded("v-half", ranks, microbatches)
    shape = block(ranks, lifetime=3)
    for rank, row in enumerate(schedule.rows):
        near, far = rank, 2 * ranks - 1 - rank
        times = shape.times(rank)
        verbs = [
            (times[0], row.forward, near),
            (times[1], row.forward, far),
            (times[2], row.backward_input, far),
            (times[3], row.backward_input, near),
        ]
        events = [
            (time + PERIOD * m, verb, stage)
            for time, verb, stage in verbs
            for m in range(microbatches)
        ]
        free = 0
        for time, verb, stage in sorted(events, key=lambda event: event[0]):
            while free < time and row.weights_left:  # weights take the times that are left
                row.backward_weight()
                free += 1
            verb(stage)
            free = time + 1
        row.backward_weight(times=row.weights_left)
    return schedule
