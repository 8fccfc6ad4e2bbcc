"""``mesh``: pipeline, data, tensor, context and expert parallelism as plain directives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from piper.base.arguments import choice, named_arguments
from piper.base.errors import DirectiveError, warn
from piper.base.units import counted
from piper.ir.mesh import MOST_DEVICES, Mesh
from piper.strategies.builder import Schedule
from piper.strategies.directives import Directive, partition, replicate, shard, split
from piper.strategies.directives.directive import check_tag, positive
from piper.strategies.replicas.uneven import MeshSpeeds, uneven
from piper.strategies.schedules.breadth_first import breadth_first
from piper.strategies.schedules.dualpipe import dualpipe
from piper.strategies.schedules.dualpipev import dualpipev
from piper.strategies.schedules.gpipe import gpipe
from piper.strategies.schedules.interleaved import interleaved
from piper.strategies.schedules.one_f_one_b import one_f_one_b
from piper.strategies.schedules.v_half import v_half
from piper.strategies.schedules.zb_h1 import zb_h1
from piper.strategies.schedules.zb_v import zb_v
from piper.strategies.strategy import Strategy

STRAIGHT: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "dualpipe": dualpipe,
}
"""One stage per rank."""
FOLDED: dict[str, Callable[[int, int], Schedule]] = {
    "zb-v": zb_v,
    "v-half": v_half,
    "dualpipev": dualpipev,
}
"""Two stages per rank, in a V."""
LOOPED: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved": interleaved,
    "breadth-first": breadth_first,
}
"""Any number of stages per rank."""


_AXES = (
    ("pipeline", "pp"),
    ("data", "dp"),
    ("tensor", "tp"),
    ("context", "cp"),
    ("expert", "ep"),
)
_ELSEWHERE = {
    **{f"{word}_parallel{end}": short for word, short in _AXES for end in ("", "_size", "ism")},
    **{f"{word}_model_parallel_size": short for word, short in _AXES},
    **{f"{short}_size": short for _, short in _AXES},
    "zero_stage": "zero",
    "fsdp": "zero=3",
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate", "num_microbatches"), "microbatches"
    ),
    "virtual_stages": "virtual",
}
"""Names of these arguments in other libraries."""


class MeshLayout(Enum):
    """Which devices have consecutive numbers."""

    PIPELINE_INNER = "pipeline-inner"
    """The ranks of one pipeline have consecutive numbers."""
    PIPELINE_OUTER = "pipeline-outer"
    """The replicas of one stage have consecutive numbers: experts dispatch and combine within a
    machine."""


def schedule_named(name: str, ranks: int, microbatches: int, virtual: int | None) -> Schedule:
    """The schedule ``name``; case and punctuation do not matter: ZB-V, zb_v, zbv."""
    plain = {_letters(known): known for known in (*STRAIGHT, *FOLDED, *LOOPED)}
    kind = plain.get(_letters(name))
    if kind is None:
        raise DirectiveError(f"schedule={name!r} is unknown: one of {', '.join(plain.values())}")
    if kind in LOOPED:
        return LOOPED[kind](ranks, microbatches, 2 if virtual is None else virtual)
    stages = 1 if kind in STRAIGHT else 2
    if virtual not in (None, stages):
        raise DirectiveError(
            f"virtual={virtual}: {kind} has {counted(stages, 'stage')} a rank; for others use "
            f"{' or '.join(LOOPED)}"
        )
    return {**STRAIGHT, **FOLDED}[kind](ranks, microbatches)


def _letters(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum())


@named_arguments(DirectiveError, _ELSEWHERE)
def mesh(
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    schedule: str | Schedule = "1f1b",
    zero: int = 0,
    expert_zero: int | None = None,
    within: int | None = None,
    microbatches: int | None = None,
    virtual: int | None = None,
    layout: str | MeshLayout = MeshLayout.PIPELINE_OUTER,
    regions: str = "layer",
    experts: str = "EP",
    by: str | Sequence[int] | Mapping[int, float] = "flops",
    speeds: Sequence[float] | Mapping[int, float] | None = None,
    bucket_mb: float = 25.0,
    parameters: Mapping[str, int | str] | None = None,
    sequence_parallel: bool = False,
    capacity: float | None = None,
    attention: str = "all_to_all",
) -> Strategy:
    """``pp`` pipeline ranks of ``dp`` * ``cp`` * ``tp`` devices each.

    The regions named ``regions`` are cut into stages, balanced ``by`` cost. ``schedule`` orders the
    stages: a schedule's name, or your own ``Schedule`` for ``pp`` ranks. Every stage is replicated
    over its ``dp`` devices with ``zero``; ``within`` devices shard one copy of the state (HSDP).
    The regions named ``experts`` are sharded over ``ep`` of the ``dp`` * ``cp`` * ``tp`` devices,
    which also shard their rows, and replicated over the rest with ``expert_zero`` (default
    ``zero``); ``capacity`` is as in ``piper.shard``.
    ``tp`` devices shard the parameters that the model declares, or ``parameters`` (as in
    ``piper.shard``), and with ``sequence_parallel`` also the activations between them. ``cp``
    devices shard the sequence, with ``attention`` as in ``piper.place``. Devices along ``tp`` have
    consecutive numbers, then those along ``cp``.
    ``speeds`` of the devices, in the order of their numbers or mapped from them: the stages of a
    faster rank get more of the model, and faster replicas more than ``microbatches``, slower ones
    fewer (see ``uneven``).
    ``virtual`` is the number of stages per rank, for schedules that leave it open. The default of
    ``microbatches`` is 1 without a pipeline, 2 * ``pp`` with one, or that of your own schedule.
    Without a pipeline the model needs no regions.
    """
    for name, value in (("pp", pp), ("dp", dp), ("tp", tp), ("cp", cp), ("ep", ep)):
        positive(name, value)
    check_tag("experts", experts)
    size = dp * cp * tp
    if pp * size > MOST_DEVICES:
        raise DirectiveError(
            f"pp={pp} * dp={dp} * cp={cp} * tp={tp} is {pp * size} devices, and a mesh has at most "
            f"{MOST_DEVICES}: use fewer"
        )
    if size % ep:
        fits = [n for n in range(1, size + 1) if size % n == 0]
        raise DirectiveError(
            f"ep={ep} does not divide the dp * cp * tp = {size} devices of a stage: {fits} do"
        )
    if dp * cp == 1 and (zero or expert_zero):
        warn(
            f"zero={zero or expert_zero} shards the state over the replicas of a stage, and there "
            "is one, so nothing is sharded: give dp=, the number of replicas"
        )
    order = _schedule(schedule, pp, microbatches, virtual)
    groups = [_group(rank, pp, dp, cp * tp, layout) for rank in range(pp)]
    axes = {"dp": dp, **({"cp": cp} if cp > 1 else {}), **({"tp": tp} if tp > 1 else {})}
    named = len(axes) > 1
    pace = stages = None
    if speeds is not None:
        held = [list(row.stages) for row in order.rows]
        counts = by if isinstance(by, Sequence) and not isinstance(by, str) else None
        work = None if counts is None else _work(counts, held)
        pace = MeshSpeeds.of(groups, dp, speeds, work)
        stages = pace.stages(held) if counts is None else None
    directives: list[Directive] = [
        partition(regions, into="PP", parts=order.stages, by=by, speeds=stages),
        split(into="MB", parts=order.microbatches),
        *order.directives(
            [Mesh(group, **axes) for group in groups] if named else groups,
            batch="dp" if named else None,
            sequence="cp" if cp > 1 else None,
            attention=attention,
        ),
    ]
    placed = 2 + sum(d.name == "place" for d in directives)
    state: list[Directive] = []
    if ep > 1 or expert_zero is not None:
        theirs = zero if expert_zero is None else expert_zero
        state.append(replicate({experts: "-"}, zero=zero, bucket_mb=bucket_mb, within=within))
        state.append(replicate({experts: "*"}, zero=theirs, bucket_mb=bucket_mb))
    else:
        state.append(replicate({}, zero=zero, bucket_mb=bucket_mb, within=within))
    if ep > 1 or (expert_zero is not None and named):
        rows = tuple(axes) if named else None
        state.append(shard({experts: "*"}, ways=ep, capacity=capacity, batch=rows))
    if tp > 1:
        where: dict[str, str] = {experts: "-"} if ep > 1 or expert_zero is not None else {}
        tensor = shard(where, axis="tp", parameters=parameters, sequence=sequence_parallel)
        state.append(tensor)
    elif parameters is not None or sequence_parallel:
        raise DirectiveError(
            "parameters= and sequence_parallel= are for tensor parallelism: give tp="
        )
    strategy = Strategy([*directives[:placed], *state, *directives[placed:]])
    return strategy if pace is None or dp == 1 else uneven(strategy, pace.devices)


def _schedule(
    schedule: str | Schedule, pp: int, microbatches: int | None, virtual: int | None
) -> Schedule:
    for name, value in (("microbatches", microbatches), ("virtual", virtual)):
        if value is not None:
            positive(name, value)
    if isinstance(schedule, str):
        usual = 1 if pp == 1 else 2 * pp  # every built-in schedule can run these
        return schedule_named(schedule, pp, microbatches or usual, virtual)
    if not isinstance(schedule, Schedule):
        raise DirectiveError(f"schedule={schedule!r} is neither a name nor a Schedule")
    asked = (pp, microbatches or schedule.microbatches)
    if asked != (schedule.ranks, schedule.microbatches) or virtual is not None:
        raise DirectiveError(
            f"{schedule.name} has {counted(schedule.ranks, 'rank')} and "
            f"{counted(schedule.microbatches, 'microbatch')}: "
            f"leave out virtual= and microbatches=, and set pp={schedule.ranks}"
        )
    return schedule


def _work(counts: Sequence[int], held: Sequence[Sequence[int]]) -> list[float]:
    """How many regions each rank has, if it has these stages and each has so many regions."""
    good = all(isinstance(n, int) and n > 0 for n in counts)
    if not good or len(counts) != 1 + max(stage for stages in held for stage in stages):
        return [1.0] * len(held)  # the partition refuses it
    return [float(sum(counts[stage] for stage in stages)) for stages in held]


def _group(rank: int, pp: int, dp: int, inner: int, layout: str | MeshLayout) -> list[int]:
    """The devices of one pipeline rank: ``dp`` times ``inner`` consecutive devices."""
    kind = choice("layout", layout, MeshLayout, DirectiveError)
    if kind is MeshLayout.PIPELINE_INNER:
        firsts = [replica * pp + rank for replica in range(dp)]
    else:
        firsts = [rank * dp + replica for replica in range(dp)]
    return [first * inner + i for first in firsts for i in range(inner)]
