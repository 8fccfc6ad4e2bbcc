"""``piper status``: the running jobs of this user on this machine."""

from __future__ import annotations

import time
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from piper.base.units import bytes_text, waiting_text
from piper.cli.options import AsJson
from piper.cli.output import Output
from piper.launch.status.seen import Number, SeenWorker, seen_workers
from piper.launch.status.waiting import WorkerState, holding_up, jobs_of, states_of

_WIDE = 160
"""The columns of a page, and of a table that no terminal shows."""


def status(
    once: Annotated[
        bool, typer.Option("--once", help="Print the state once, as without a terminal.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the state to a page.", show_default=False)
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Show where every worker of the running jobs is, and who waits for whom.

    It shows the jobs of this user on this machine, under processes, torchrun and Ray, also while
    they hang. Ctrl-C ends the table, not the jobs.

    Example: piper status --once
    """
    output = Output(as_json)
    with output.guarded():
        if html is not None:
            page = Console(record=True, file=StringIO(), width=_WIDE)
            page.print(_shown(seen_workers()))
            html.write_text(page.export_html(inline_styles=True))
            output.wrote("state", html)
        elif as_json or once or not output.out.is_terminal:
            workers = seen_workers()
            output.give({"jobs": [_json(states_of(job)) for job in jobs_of(workers)]})
            if not as_json:
                out = output.out if output.out.is_terminal else Console(width=_WIDE)
                out.print(_shown(workers))
        else:
            with Live(console=output.out, auto_refresh=False) as live:
                while True:
                    live.update(_shown(seen_workers()), refresh=True)
                    time.sleep(every)


def _shown(workers: list[SeenWorker]) -> Group:
    """All jobs as tables."""
    if not workers:
        return Group("no job of this user has workers on this machine")
    return Group(*(part for job in jobs_of(workers) for part in _job(states_of(job))))


def _job(states: list[WorkerState]) -> list[Table | str]:
    first = states[0].worker
    here = f"{len(states)} of {first.devices} devices"
    table = Table(
        title=f"job {first.job[:8]}, {here}, {first.tokens_per_second:,.0f} tokens/s",
        title_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name, right in [
        ("device", True),
        ("process", True),
        ("step", True),
        ("for", True),
        ("instruction", False),
        ("waits for", False),
        ("peak memory", True),
    ]:
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    for state in states:
        worker = state.worker
        table.add_row(
            str(worker.device),
            str(worker.pid),
            f"{_step(worker):,}",
            waiting_text(_since(worker)),
            escape(_where(state)),
            escape(_awaited(state)),
            bytes_text(worker.header[Number.MEMORY]),
        )
    held = [
        escape(f"the others wait for device {x.worker.device}, {_where(x)}")
        for x in holding_up(states)
    ]
    return [table, *held]


def _step(worker: SeenWorker) -> int:
    """The step that it makes, or the last one that it made."""
    return worker.header[Number.STEPS] + (worker.at is not None)


def _since(worker: SeenWorker) -> float:
    """Seconds since its last step ended."""
    return max(0.0, time.monotonic() - worker.header[Number.ENDED] / 1e9)


def _where(state: WorkerState) -> str:
    at = state.worker.at
    place = "between two calls" if at is None else f"{state.worker.pc} {at.name}"
    return f"{place} (stopped by a signal)" if state.stopped else place


def _awaited(state: WorkerState) -> str:
    awaited = state.worker.awaited
    if awaited is None:
        return ""
    devices = ", ".join(map(str, state.waits_for))
    return f"{awaited.name}, from device {devices}" if devices else awaited.name


def _json(states: list[WorkerState]) -> dict[str, Any]:
    first = states[0].worker
    return {
        "job": first.job,
        "devices": first.devices,
        "tokens_per_second": first.tokens_per_second,
        "held_up_by": [state.worker.device for state in holding_up(states)],
        "workers": [
            {
                "device": state.worker.device,
                "process": state.worker.pid,
                "step": _step(state.worker),
                "seconds_since_step": _since(state.worker),
                "instruction": None if state.worker.at is None else state.worker.pc,
                "name": None if state.worker.at is None else state.worker.at.name,
                "awaited": None if state.worker.awaited is None else state.worker.awaited.name,
                "waits_for": list(state.waits_for),
                "stopped": state.stopped,
                "peak_memory_bytes": state.worker.header[Number.MEMORY],
            }
            for state in states
        ],
    }
