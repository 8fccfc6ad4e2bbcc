"""Schedules with emulated kernels: the share of their theoretical speed that a runtime reaches.

Blocks sleep instead of computing (see emulated.py), F : BI : BW = 1 : 1 : 1, so that more workers
than cores still show the schedule. Everything else is real: processes, gloo, the loopback. Ours and
``torch.distributed.pipelining`` take turns:

    4 workers x 8 microbatches, 8 x 16, 16 x 32

The ideal is the schedule on paper, where sending takes no time and sleeps take what they take when
alone; "of ideal" is what is left of it.

    python bench/emulated_pipelines.py [--workers 4] [--seconds 0.04] [--json FILE]
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from asleep import SCHEDULES, Asleep
from peers import Piped
from report import Case, Comparison, print_cases
from turns import Side, turns
from workers import ENVIRONMENT, Launched, Peers, Way, chosen

import piper


def main(
    workers: Annotated[list[int] | None, typer.Option(help="4, 8 and 16, or some.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="Ours, by name; or all.")] = None,
    seconds: Annotated[float, typer.Option(help="Of a block's forward, and each backward.")] = 0.04,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side has its turn.")] = 4,
    turn: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 1,
    warm: Annotated[int, typer.Option(min=1, help="Steps before anything is timed.")] = 2,
    file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare schedules of sleeping blocks."""
    os.environ |= ENVIRONMENT
    cases = []
    for count in workers or (4, 8, 16):
        work = Asleep(count, 2 * count, (seconds, seconds, seconds))
        lengths = work.lengths()

        def start(
            way: piper.Program | Way, stack: contextlib.ExitStack, count: int = count
        ) -> Side:
            if isinstance(way, piper.Program):
                return Launched(way, stack)
            return Peers(way, count, stack)

        for name in chosen(schedule, SCHEDULES):
            ours, theirs = f"piper {name}", f"torch {SCHEDULES[name]}"
            ways: dict[str, piper.Program | Way] = {
                ours: work.program(name),
                theirs: Piped(work, SCHEDULES[name]),
            }
            found = turns(work.batch, ways, start, rounds=rounds, turn=turn, warm=warm)
            label = f"{count} workers x {work.microbatches} microbatches, {name}"
            cases.append(
                Case(label, theirs, found, dict.fromkeys(found, work.ideal(name, lengths)))
            )
    where = f"blocks sleep {1e3 * seconds:g} ms a pass, alone {1e3 * lengths[0]:.2f}"
    where += f", torch {torch.__version__}"
    comparison = Comparison("emulated pipelines", where, cases)
    print_cases(comparison)
    if file is not None:
        comparison.write(file)
    comparison.check()


if __name__ == "__main__":
    typer.run(main)
