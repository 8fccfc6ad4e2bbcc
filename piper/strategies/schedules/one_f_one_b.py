"""1F1B: each backward as early as possible, then one forward (PipeDream-Flush, Narayanan et al.
2021).

    rank 0   F0 F1 F2       B0 F3 B1    B2    B3
    rank 1      F0 F1    B0 F2 B1 F3 B2    B3
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

bubble       (PP - 1)(F + B)
activations  PP - rank microbatches
"""

from __future__ import annotations

from piper.strategies.builder import Schedule, straight


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Any number of microbatches."""
    schedule = straight("1f1b", ranks, microbatches)
    for rank, row in enumerate(schedule.rows):
        ahead = min(ranks - rank, microbatches)
        row.forward(rank, times=ahead)  # warm-up
        while row.forwards_left(rank):  # steady
            row.backward(rank).forward(rank)
        row.backward(rank, times=row.backwards_left(rank))  # cool-down
    return schedule
