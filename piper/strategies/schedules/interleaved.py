"""Interleaved 1F1B: several smaller stages per rank, which shortens the bubble (Narayanan et al.
2021).

    2 ranks, 2 stages each: rank r has stages r and r + 2
    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
    rank 1       1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

bubble       (PP - 1)(F + B) / V, with V stages per rank
activations  up to PP * (1 + (PP - 1) / (PP * V)) microbatches of the whole rank
"""

from __future__ import annotations

from piper.strategies.builder import Schedule, looped, refuse


def interleaved(ranks: int, microbatches: int, virtual: int = 2) -> Schedule:
    """The number of microbatches must be a multiple of ``ranks``: each stage runs ``ranks``
    microbatches at a time."""
    schedule = looped("interleaved", ranks, virtual, microbatches)
    needs = f"a multiple of the {ranks} ranks ({ranks}, {2 * ranks}, {3 * ranks}, ...)"
    refuse("interleaved", microbatches, needs, microbatches % ranks == 0)
    total = virtual * microbatches
    for rank, row in enumerate(schedule.rows):
        forwards = _turns(rank, ranks, virtual, total)
        backwards = [rank + ranks * (virtual - 1) - (s - rank) for s in forwards]
        ahead = min(total, (virtual - 1) * ranks + 2 * (ranks - rank - 1) + 1)
        for stage in forwards[:ahead]:  # warm-up
            row.forward(stage)
        for backward, forward in zip(backwards, forwards[ahead:], strict=False):  # steady
            row.backward(backward).forward(forward)
        for backward in backwards[total - ahead :]:  # cool-down
            row.backward(backward)
    return schedule


def _turns(rank: int, ranks: int, virtual: int, total: int) -> list[int]:
    """The stage of each forward: blocks of ``ranks`` microbatches, stage by stage."""
    return [rank + ranks * (i // ranks % virtual) for i in range(total)]
