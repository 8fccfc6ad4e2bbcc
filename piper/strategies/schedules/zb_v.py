"""ZB-V: a V of stages without a bubble if forward, input and weight passes take equally long (Qi et
al. 2023).

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 ...
    rank 1       1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 ...

bubble       0 for F = I = W and at least 2 * ranks - 1 microbatches; grows with their inequality
activations  2 * ranks microbatches of half a rank's layers: as 1F1B
"""

from __future__ import annotations

from piper.strategies.builder import Schedule, folded, refuse


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """At least 2 * ranks - 1 microbatches."""
    schedule = folded("zb-v", ranks, microbatches)
    needs = f"at least {2 * ranks - 1}"
    refuse("zb-v", microbatches, needs, microbatches >= 2 * ranks - 1)
    for rank, row in enumerate(schedule.rows):
        near, far = rank, 2 * ranks - 1 - rank
        row.forward(near, times=2 * (ranks - rank) - 1)  # warm-up: fill the stages up to the turn
        for _ in range(rank):  # forwards on both stages
            row.forward(far).forward(near)
        for _ in range(ranks - rank):  # the first backwards
            row.forward(far).backward_input(far).backward_weight()
        while row.forwards_left(far):  # steady
            if row.forwards_left(near):
                row.forward(near)
            row.backward_input(near).backward_weight()
            row.forward(far).backward_input(far).backward_weight()
        for _ in range(rank):  # cool-down: weight passes wait
            row.backward_input(near).backward_input(far)
        for _ in range(ranks - rank):
            row.backward_input(near).backward_weight()
        row.backward_weight(times=row.weights_left)
    return schedule
