"""DualPipeV: a V of stages whose forwards and backwards overlap in pairs (DeepSeek-AI 2025, after
a cut of DualPipe by Sea AI Lab).

    2 ranks, 4 stages: rank r has stage r (down) and stage 3 - r (up)
    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3 3B1)(3F2 0B0) 3B2 (3F3 0B1) 3B3 0I2 W 0I3 W
    rank 1       1F0 2F0 1F1 2F1 1F2 2B0 (2F2 1B0)(1F3 2B1) ...
    ( ) overlap: compute of one hides the dispatch and combine of the other

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
    """The order of one rank. ``near`` is its first stage; ``far`` is its stage after the turn,
    which is at the last rank."""
    after = ranks - 1 - rank
    row.forward(near, times=2 * after)  # 1: fill the stages up to the turn
    for _ in range(rank + 1):  # 2: the first microbatches return from the turn
        row.forward(near).forward(far)
    for _ in range(after):  # 3: first backwards, each weight half at once
        row.backward_input(far).backward_weight().forward(far)
    for i in range(microbatches - 2 * ranks + rank + 1):  # 4: steady state, all in pairs
        if i == 0 and after == 0:  # the last rank has nothing to overlap with yet
            row.forward(near).backward(far)
        else:
            row.pair(forward=near, backward=far)
        row.pair(forward=far, backward=near)
    for _ in range(after):  # 5: no near forwards left
        row.backward(far).pair(forward=far, backward=near)
    halves = 2 * (rank + 1)  # 6: only backwards; in the second half the weight passes wait
    for i in range(halves):
        stage = near if i % 2 else far
        if i < halves // 2:
            row.backward(stage)
        else:
            row.backward_input(stage)
    for _ in range(after):  # 7: weight passes fill the gaps
        row.backward_weight().backward_input(near)
    row.backward_weight(times=row.weights_left)  # 8: the remaining weight passes
