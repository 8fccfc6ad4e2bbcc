"""Searches for the fastest strategy of a captured model on a cluster."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from piper.base.errors import PiperError
from piper.base.units import seconds_text
from piper.cost.cluster import Cluster
from piper.cost.simulate.estimate import Estimate
from piper.cost.tasks import CostModel
from piper.ir.dag.facts import Model
from piper.program.compile.compiler import Capture
from piper.program.tune.candidate import Candidate
from piper.program.tune.search import Search
from piper.program.tune.space import SCHEDULES, Space
from piper.program.tune.tuned import Tried, Tuned
from piper.program.tune.workload import Workload


def searched(
    captured: Capture,
    cluster: Cluster,
    *,
    devices: int | None = None,
    seconds: float = 30.0,
    regions: str | None = None,
    schedules: Sequence[str] = SCHEDULES,
    costs: CostModel | None = None,
    among: Iterable[Candidate] | None = None,
    progress: bool | None = None,
) -> Tuned:
    """The result of a search; ``piper.tune`` describes the arguments. ``among`` are the candidates
    to try, and no others, in place of the whole space."""
    space, work = space_of(captured, cluster, devices, regions, schedules)

    def estimate(candidate: Candidate, on: Cluster = cluster) -> Estimate:
        return captured.estimate(candidate.strategy, on, costs=costs)

    search = Search(space, work, estimate, among)
    with _shown(seconds, progress) as shown:
        search.run(seconds, shown)
    return Tuned(cluster, _sorted(search), search.within, estimate)


def space_of(
    captured: Capture,
    cluster: Cluster,
    devices: int | None = None,
    regions: str | None = None,
    schedules: Sequence[str] = SCHEDULES,
) -> tuple[Space, Workload]:
    """All candidates of a model on ``devices`` of a cluster, and what is known of their work."""
    if not isinstance(cluster, Cluster):
        raise PiperError(f"cluster={cluster!r} must be a piper.Cluster")
    count = len(cluster) if devices is None else devices
    if not 1 <= count <= len(cluster):
        raise PiperError(f"devices={count}: {cluster} has {len(cluster)}")
    model = captured.model
    tag = _regions(model, regions)
    work = Workload(model, tag, cluster, captured.optimizer_cost, captured.fused)
    space = Space(
        devices=count,
        batch=model.batch,
        layers=work.layers,
        regions=tag,
        machine=min(len(box.devices) for box in cluster.machines),
        tensor=bool(model.declared),
        experts=any("EP" in chunk.tags for chunk in model.chunks),
        schedules=tuple(schedules),
    )
    return space, work


def _regions(model: Model, given: str | None) -> str:
    """The name of the regions that stages are made of: ``given``, or the one with the most."""
    named = {(name, i) for chunk in model.chunks for name, i in chunk.tags.items()}
    counts = Counter(name for name, _ in sorted(named) if name != "EP")
    if given is not None:
        if given not in counts:
            raise PiperError(f"regions={given!r}: there are {', '.join(counts) or 'none'}")
        return given
    return "layer" if "layer" in counts or not counts else counts.most_common(1)[0][0]


def _sorted(search: Search) -> tuple[Tried, ...]:
    fitting = [x for x in search.tried.values() if not x.refused]
    refused = [x for x in search.tried.values() if x.refused]
    return (*sorted(fitting, key=lambda x: x.seconds), *refused, *search.left)


def with_measured(tuned: Tuned, rows: Iterable[Tried]) -> Tuned:
    """``tuned`` with measured candidates: these come first, by their measured time."""
    known = {x.candidate: x for x in rows}
    rest = [x for x in tuned.candidates if x.candidate not in known]
    return replace(tuned, candidates=(*sorted(known.values(), key=lambda x: x.seconds), *rest))


@contextmanager
def _shown(seconds: float, progress: bool | None) -> Iterator[Callable[[Search], None] | None]:
    """Shows the search on a terminal: a bar of its time, and the best until now."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("tuning"), BarColumn(), TextColumn("{task.description}")
    begun = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("capturing the model", total=seconds)

        def show(search: Search) -> None:
            best = search.best
            found = "nothing fits yet"
            if best is not None:
                found = f"{seconds_text(best.seconds)}: {best.candidate}"
            said = f"{len(search.tried):,} tried, {search.waiting:,} left; {found}"
            bar.update(task, completed=time.monotonic() - begun, description=said)

        yield partial(show)
