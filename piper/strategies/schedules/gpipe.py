"""GPipe: all forwards, then all backwards (Huang et al. 2019).

    rank 0   F0 F1 F2 F3             B0 B1 B2 B3
    rank 1      F0 F1 F2 F3       B0 B1 B2 B3
    rank 2         F0 F1 F2 F3 B0 B1 B2 B3

bubble       (PP - 1)(F + B)
activations  M microbatches on every rank
"""

from __future__ import annotations

from piper.strategies.builder import Schedule, straight


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Any number of microbatches."""
    schedule = straight("gpipe", ranks, microbatches)
    for rank, row in enumerate(schedule.rows):
        row.forward(rank, times=microbatches)
        row.backward(rank, times=microbatches)
    return schedule
