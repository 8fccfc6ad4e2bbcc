"""ZB-H1: 1F1B with delayed weight passes that fill the bubble (Qi et al. 2023).

    rank 0   F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1      F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2         F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

bubble       (PP - 1)(F + B - 2W), with B = I + W; holds for F = I = W and at least PP microbatches
activations  PP microbatches on every rank: as many as 1F1B has on rank 0
"""

from __future__ import annotations

from piper.strategies.builder import Schedule, straight


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Any number of microbatches."""
    schedule = straight("zb-h1", ranks, microbatches)
    for rank, row in enumerate(schedule.rows):
        waiting = rank  # delayed weight passes: so every rank holds PP microbatches
        row.forward(rank, times=min(ranks - rank, microbatches))
        while row.backwards_left(rank):
            row.backward_input(rank)
            if row.weights_left > waiting:
                row.backward_weight()
            if row.forwards_left(rank):
                row.forward(rank)
        row.backward_weight(times=row.weights_left)
    return schedule
