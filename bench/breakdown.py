"""Where the time of a step goes: parts that add up to the step, beside its lower limit.

Runs the reference pipeline of pipelines.py on two workers and measures each instruction. For each
worker the table has seconds in forwards, backwards and updates, seconds of exposed messages, and
seconds spent waiting for the other worker. The limit is the schedule on paper, with the measured
pass lengths and nothing else. Beside it stands the step time that a caller sees, which includes
passing in the batch and returning the loss.

    python bench/breakdown.py [--schedule zb-v] [--microbatches 8]
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from typing import Annotated

import typer
from pipelines import WORKERS, program
from rich.console import Console
from rich.table import Table
from work import Work, reference
from workers import ENVIRONMENT

import piper
from piper.ir.ops import Compute, Update
from piper.strategies import schedule_named, timed


def main(
    schedule: Annotated[list[str] | None, typer.Option(help="Ours, by name.")] = None,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    steps: Annotated[int, typer.Option(min=3, help="Steps measured.")] = 9,
) -> None:
    """Print a table for each schedule."""
    os.environ |= ENVIRONMENT
    work = Work(reference(8, 256, 128, 1024), WORKERS, microbatches, 1)
    for name in schedule or ("1f1b", "zb-v"):
        _print(work, name, steps)


def _print(work: Work, name: str, steps: int) -> None:
    what = program(work, name)
    with piper.launch(what, on="processes", threads=1) as trainer:
        for seed in range(3):
            trainer.step(*work.batch(seed))
        taken = []
        for seed in range(steps):
            start = time.perf_counter()
            trainer.step(*work.batch(seed))
            taken.append(time.perf_counter() - start)
        profile = trainer.profile(*work.batch(0), steps=steps)
    step = profile.seconds
    ops = [node.op for node in what.dag.nodes]
    table = Table(title=f"{name}, {work.microbatches} microbatches: a step of {1e3 * step:,.0f} ms")
    table.add_column("")
    parts: dict[str, list[float]] = defaultdict(lambda: [0.0] * WORKERS)
    passes: dict[str, float] = defaultdict(float)
    for rank, (device, spans) in enumerate(sorted(profile.spans.items())):
        table.add_column(f"worker {device} (ms)", justify="right")
        table.add_column("share", justify="right")
        for span in spans:
            op, seconds = ops[span.node], span.end - span.start
            if isinstance(op, Compute):
                parts[f"passes {op.which.name}"][rank] += seconds
                passes[op.which.name] += seconds
            elif isinstance(op, Update):
                parts["updates"][rank] += seconds
        busy = profile.busy[device]
        parts["messages that nothing covers"][rank] = busy.exposed
        parts["nothing to do yet"][rank] = busy.idle - busy.exposed
    for part, row in parts.items():
        table.add_row(part, *_cells(row, step))
    whole = [sum(column) for column in zip(*parts.values(), strict=True)]
    table.add_row("all", *_cells(whole, step))
    console = Console(width=100)
    console.print(table)
    limit = 1e3 * _limit(work, name, passes)
    outside = 1e3 * statistics.median(taken)
    console.print(f"the limit, with passes as long as here: {limit:,.0f} ms")
    console.print(f"steps that were not measured, from outside: {outside:,.0f} ms")


def _cells(row: list[float], step: float) -> list[str]:
    return [cell for x in row for cell in (f"{1e3 * x:,.1f}", f"{x / step:.1%}")]


def _limit(work: Work, name: str, passes: dict[str, float]) -> float:
    """Seconds of the schedule on paper, with these pass lengths."""
    found = schedule_named(name, WORKERS, work.microbatches, None)
    each = found.stages * work.microbatches
    half = sum(passes[which] for which in ("B", "BI", "BW")) / each / 2
    on_paper = timed(found, forward=passes["F"] / each, backward_input=half, backward_weight=half)
    return max(cell.end for row in on_paper.cells for cell in row)


if __name__ == "__main__":
    typer.run(main)
