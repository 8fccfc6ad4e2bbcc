"""``tune``: searches for the fastest strategy, and measures the best where devices are there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from piper.base.errors import PiperError
from piper.cost.cluster import Cluster
from piper.cost.recorded import Recorded
from piper.launch.launch import launch
from piper.program.compile.compiler import Capture
from piper.program.tune.searched import searched, with_measured
from piper.program.tune.space import SCHEDULES
from piper.program.tune.tuned import Tried, Tuned

_STEPS = 3
"""Measured steps of a candidate, after one to warm up."""
_CORRECTED = 30
"""The best so many are estimated again from what was measured."""


def tune(
    captured: Capture,
    cluster: Cluster,
    *,
    devices: int | None = None,
    seconds: float = 30.0,
    regions: str | None = None,
    schedules: Sequence[str] = SCHEDULES,
    measure: int = 0,
    on: str = "processes",
    options: dict[str, Any] | None = None,
    progress: bool | None = None,
) -> Tuned:
    """Search for the strategy whose step is fastest on ``cluster`` and fits its memory.

    Searched are the sizes of pipeline, data, tensor, context and expert parallelism over all
    ``devices`` (default: those of the cluster), ``schedules``, microbatches, ZeRO levels and
    recomputation; near the best also stage bounds, the number of recomputed regions, bucket sizes
    and the numbering of devices. ``regions`` are what stages are made of. The search ends after
    ``seconds`` (four times as late if nothing fits until then), or when no other candidate can be
    faster; the first trace of the model comes before. Every candidate's time and memory are
    those of ``captured.estimate``, hence of the compiled program.

    ``measure`` trains a few steps with so many of the best, with the launcher ``on`` and its
    ``options``. Each profile corrects the estimates of the best, of which the fastest is measured
    next. The example batch must hold real tensors.
    """
    how = {"devices": devices, "regions": regions, "schedules": schedules, "progress": progress}
    found = searched(captured, cluster, seconds=seconds, **how)  # type: ignore[arg-type]
    if measure == 0:
        return _compiling(captured, found)
    rows: dict[Any, Tried] = {}
    recorded: Recorded | None = None
    for _ in range(measure):
        waiting = [x for x in found.fitting if x.candidate not in rows]
        if not waiting:
            break
        chosen = waiting[0]
        try:
            took, profile = _measured(captured, chosen, cluster, on, options or {})
        except PiperError as error:
            found = _refused(found, chosen, error)
            continue
        rows[chosen.candidate] = replace(chosen, measured=took)
        recorded = profile if recorded is None else recorded + profile
        found = _corrected(captured, cluster, found, recorded)
    known = {x.candidate: x for x in found.candidates}
    best = [replace(known[c], measured=x.measured) for c, x in rows.items() if c in known]
    return with_measured(found, best)


def _corrected(captured: Capture, cluster: Cluster, found: Tuned, recorded: Recorded) -> Tuned:
    """``found`` with the estimates of its best from measured times; these come first."""
    rows = [
        replace(x, estimate=captured.estimate(x.strategy, cluster, costs=recorded))
        for x in found.fitting[:_CORRECTED]
    ]
    rows.sort(key=lambda x: x.seconds)
    others = {x.candidate for x in rows}
    rest = [x for x in found.candidates if x.candidate not in others]
    return replace(found, candidates=(*rows, *rest))


def _refused(found: Tuned, chosen: Tried, error: PiperError) -> Tuned:
    kept = [x for x in found.candidates if x is not chosen]
    return replace(found, candidates=(*kept, replace(chosen, refused=str(error))))


def _compiling(captured: Capture, found: Tuned) -> Tuned:
    """``found``, whose first compiles: what only compilation refuses is refused here."""
    while found.fitting:
        chosen = found.fitting[0]
        try:
            captured.compile(chosen.strategy, costs=found.cluster)
        except PiperError as error:
            found = _refused(found, chosen, error)
        else:
            break
    return found


def _measured(
    captured: Capture, chosen: Tried, cluster: Cluster, on: str, options: dict[str, Any]
) -> tuple[float, Recorded]:
    """The median seconds of a step, and its profile."""
    program = captured.compile(chosen.strategy, costs=cluster)
    with launch(program, on=on, **options) as trainer:
        batch = trainer.example
        trainer.step(*batch)
        took = statistics.median(trainer.step(*batch).seconds for _ in range(_STEPS))
        return took, trainer.profile(*batch, steps=_STEPS).recorded
