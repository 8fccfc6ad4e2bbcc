"""Looped breadth-first: several stages per rank, each runs all microbatches in a row (Lamy-Poirier
2023).

    2 ranks, 2 stages each
    rank 0   0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3         2B0 2B1 2B2 2B3 0B0 0B1 0B2 0B3
    rank 1       1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3 1B0 1B1 1B2 1B3

bubble       (PP - 1)(F + B) / V, with V stages per rank
activations  M microbatches on every rank
A stage runs all microbatches consecutively. So ZeRO-3 gathers its parameters once per pass, and a
rank holds the gathered parameters of one stage at a time.
"""

from __future__ import annotations

from piper.strategies.builder import Schedule, looped


def breadth_first(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """Any number of microbatches; with fewer than ``ranks``, a rank idles between its stages."""
    schedule = looped("breadth-first", ranks, virtual, microbatches)
    for rank, row in enumerate(schedule.rows):
        stages = [rank + ranks * v for v in range(virtual)]
        for stage in stages:
            row.forward(stage, times=microbatches)
        for stage in reversed(stages):
            row.backward(stage, times=microbatches)
    return schedule
