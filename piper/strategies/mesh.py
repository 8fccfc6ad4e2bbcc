"""``mesh``: pipeline, data and expert parallelism composed, as plain directives."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from piper.directives import Directive, partition, replicate, shard, split
from piper.directives.base import positive
from piper.errors import DirectiveError
from piper.strategies.breadth_first import breadth_first
from piper.strategies.builder import Schedule
from piper.strategies.dualpipe import dualpipe
from piper.strategies.dualpipev import dualpipev
from piper.strategies.gpipe import gpipe
from piper.strategies.interleaved import interleaved
from piper.strategies.one_f_one_b import one_f_one_b
from piper.strategies.v_half import v_half
from piper.strategies.zb_h1 import zb_h1
from piper.strategies.zb_v import zb_v
from piper.strategy import Strategy

STRAIGHT: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "dualpipe": dualpipe,
}
"""One stage a rank."""
FOLDED: dict[str, Callable[[int, int], Schedule]] = {
    "zb-v": zb_v,
    "v-half": v_half,
    "dualpipev": dualpipev,
}
"""Two stages a rank, in a V."""
LOOPED: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved": interleaved,
    "breadth-first": breadth_first,
}
"""Any number of stages a rank."""


class Layout(Enum):
    """Which devices are neighbours."""

    PIPELINE_INNER = "pipeline-inner"
    """Ranks of one pipeline have neighbouring numbers."""
    PIPELINE_OUTER = "pipeline-outer"
    """Replicas of one stage have neighbouring numbers: experts exchange within a machine."""


def schedule_named(name: str, ranks: int, microbatches: int, virtual: int | None) -> Schedule:
    """The schedule of that name."""
    if name in LOOPED:
        return LOOPED[name](ranks, microbatches, virtual or 2)
    fixed = {**dict.fromkeys(STRAIGHT, 1), **dict.fromkeys(FOLDED, 2)}
    if name not in fixed:
        known = ", ".join([*STRAIGHT, *FOLDED, *LOOPED])
        raise DirectiveError(f"schedule={name!r} is unknown: one of {known}")
    if virtual not in (None, fixed[name]):
        raise DirectiveError(
            f"virtual={virtual}: {name} has {fixed[name]} stage(s) a rank; for others use "
            f"{' or '.join(LOOPED)}"
        )
    return {**STRAIGHT, **FOLDED}[name](ranks, microbatches)


def mesh(
    *,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    schedule: str = "1f1b",
    zero: int = 0,
    microbatches: int = 1,
    virtual: int | None = None,
    layout: str = Layout.PIPELINE_OUTER.value,
    regions: str = "layer",
    experts: str = "EP",
    bucket_mb: float = 25.0,
) -> Strategy:
    """``pp`` pipeline ranks of ``dp`` devices each, on pp * dp devices.

    The regions named ``regions`` are cut into stages, which ``schedule`` orders; every stage is
    replicated over its ``dp`` devices with ``zero``; the regions named ``experts`` are divided over
    ``ep`` of them. ``virtual`` is the number of stages a rank, for schedules that leave it open.
    """
    for name, value in (("pp", pp), ("dp", dp), ("ep", ep), ("microbatches", microbatches)):
        positive(name, value)
    if dp % ep:
        fits = [n for n in range(1, dp + 1) if dp % n == 0]
        raise DirectiveError(f"ep={ep} does not divide the dp={dp} devices of a stage: {fits} do")
    order = schedule_named(schedule, pp, microbatches, virtual)
    groups = [_group(rank, pp, dp, layout) for rank in range(pp)]
    directives: list[Directive] = [
        partition(regions, into="PP", parts=order.stages),
        split(into="MB", parts=microbatches),
        *order.directives(groups),
    ]
    placed = 2 + sum(d.name == "place" for d in directives)
    state: list[Directive] = []
    if ep > 1:
        state.append(replicate({experts: "-"}, zero=zero, bucket_mb=bucket_mb))
        state.append(replicate({experts: "*"}, zero=zero, bucket_mb=bucket_mb))
        state.append(shard({experts: "*"}, ways=ep))
    else:
        state.append(replicate({}, zero=zero, bucket_mb=bucket_mb))
    return Strategy([*directives[:placed], *state, *directives[placed:]])


def _group(rank: int, pp: int, dp: int, layout: str) -> list[int]:
    """The devices of one pipeline rank."""
    match layout:
        case Layout.PIPELINE_INNER.value:
            return [replica * pp + rank for replica in range(dp)]
        case Layout.PIPELINE_OUTER.value:
            return [rank * dp + replica for replica in range(dp)]
        case _:
            names = ", ".join(kind.value for kind in Layout)
            raise DirectiveError(f"layout={layout!r} is unknown: one of {names}")
