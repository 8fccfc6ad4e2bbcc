"""DualPipeV: a V of stages whose forwards and backwards overlap in pairs (DeepSeek-AI 2025, after
a cut of DualPipe by Sea AI Lab).

    2 ranks, 4 stages: rank r has stage r (down) and stage 3 - r (up)
    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3 3B1)(3F2 0B0) 3B2 (3F3 0B1) 3B3 0I2 W 0I3 W
    rank 1       1F0 2F0 1F1 2F1 1F2 2B0 (2F2 1B0)(1F3 2B1) ...
    ( ) overlap: the dispatch and combine of one hides behind the compute of the other

bubble       (PP/2 - 1)(F&B + B - 3W) over PP = 2 * ranks stages, where F = B - W = W
activations  2 * ranks + 1 microbatches of half a rank's layers
"""

from __future__ import annotations

from piper.strategies.builder import Row, Schedule, folded, refuse


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """At least twice as many microbatches as ranks."""
    schedule = folded("dualpipev", ranks, microbatches)
    needs = f"at least {2 * ranks}"
    refuse("dualpipev", microbatches, needs, microbatches >= 2 * ranks)
    for rank, row in enumerate(schedule.rows):
        eight_phases(row, rank, 2 * ranks - 1 - rank, rank, ranks, microbatches)
    return schedule


def eight_phases(row: Row, near: int, far: int, rank: int, ranks: int, microbatches: int) -> None:
    """The order of one rank: ``near`` is the stage that it begins with, ``far`` the one that
    comes back to it; the last rank is where the two meet."""
    after = ranks - 1 - rank
    row.forward(near, times=2 * after)  # 1: fill the way to the turn
    for _ in range(rank + 1):  # 2: the first come back
        row.forward(near).forward(far)
    for _ in range(after):  # 3: first backwards, their weights at once
        row.backward_input(far).backward_weight().forward(far)
    for i in range(microbatches - 2 * ranks + rank + 1):  # 4: steady, all in pairs
        if i == 0 and after == 0:  # the turn has nothing to overlap with yet
            row.forward(near).backward(far)
        else:
            row.pair(forward=near, backward=far)
        row.pair(forward=far, backward=near)
    for _ in range(after):  # 5: no more on the near side
        row.backward(far).pair(forward=far, backward=near)
    halves = 2 * (rank + 1)  # 6: backwards alone, whose weights wait in the second half
    for i in range(halves):
        stage = near if i % 2 else far
        if i < halves // 2:
            row.backward(stage)
        else:
            row.backward_input(stage)
    for _ in range(after):  # 7: weights fill the gaps
        row.backward_weight().backward_input(near)
    row.backward_weight(times=row.weights_left)  # 8
