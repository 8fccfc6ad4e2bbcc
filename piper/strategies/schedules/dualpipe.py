"""DualPipe: microbatches enter at both ends and meet (DeepSeek-V3, 2024).

    4 ranks, 4 stages, each on two ranks: rank r has stage r for the first half of the microbatches
    and stage 3 - r for the second half
    first half   stage 0 1 2 3 on rank 0 1 2 3   ─▶
    second half  stage 3 2 1 0 on rank 0 1 2 3   ◀─

bubble       (PP/2 - 1)(F&B + B - 3W), where F = B - W = W
activations  PP + 1 microbatches
parameters   twice: gradients are summed over the two ranks that hold a stage
"""

from __future__ import annotations

from piper.base.errors import DirectiveError
from piper.strategies.builder import Row, Schedule, check_size, refuse
from piper.strategies.schedules.dualpipev import eight_phases


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """An even number of ranks; an even number of microbatches, at least twice as many as ranks."""
    check_size(ranks=ranks, microbatches=microbatches)
    if ranks % 2:
        raise DirectiveError(f"dualpipe needs an even number of ranks, not {ranks}")
    good = microbatches % 2 == 0 and microbatches >= 2 * ranks
    needs = f"an even number, at least {2 * ranks}"
    refuse("dualpipe", microbatches, needs, good)
    half = microbatches // 2
    first, second = range(half), range(half, microbatches)
    schedule = Schedule("dualpipe", microbatches)
    for rank in range(ranks):
        mirror = ranks - 1 - rank
        schedule.rows.append(Row({rank: first, mirror: second}))
        turn = min(rank, mirror)  # distance from the end where its near microbatches enter
        eight_phases(schedule.rows[-1], turn, ranks - 1 - turn, turn, ranks // 2, half)
    return schedule
