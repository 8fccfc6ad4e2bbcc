"""Schedules with emulated kernels: the share of a schedule's theoretical speed that a runtime
reaches.

Blocks sleep instead of computing (see emulated.py), F : BI : BW = 1 : 1 : 1, so that more workers
than cores still follow the schedule. Everything else is real: processes, gloo, the loopback. Ours
and ``torch.distributed.pipelining`` take turns:

    4 workers x 8 microbatches, 8 x 16, 16 x 32

The ideal is the schedule on paper: messages take no time, and a pass takes as long as its operators
alone. "of ideal" is the ideal time divided by the measured time.

    python bench/emulated_pipelines.py [--workers 4] [--seconds 0.04] [--json FILE]
"""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer
from asleep import SCHEDULES, Asleep
from options import File, Rounds, Turn, Warm, chosen
from peers import Piped
from report import Case, Comparison
from turns import turns
from workers import ENVIRONMENT, Way, starter

import piper


def main(
    workers: Annotated[list[int] | None, typer.Option(help="4, 8 and 16, or some.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="Ours, by name; or all.")] = None,
    seconds: Annotated[float, typer.Option(help="Of a block's forward, and each backward.")] = 0.04,
    rounds: Rounds = 4,
    turn: Turn = 1,
    warm: Warm = 2,
    file: File = None,
) -> None:
    """Compare schedules of sleeping blocks."""
    os.environ |= ENVIRONMENT
    cases = []
    for count in workers or (4, 8, 16):
        work = Asleep(count, 2 * count, (seconds, seconds, seconds))
        lengths = work.lengths()
        for name in chosen(schedule, SCHEDULES):
            ours, theirs = f"piper {name}", f"torch {SCHEDULES[name]}"
            ways: dict[str, piper.Program | Way] = {
                ours: work.program(name),
                theirs: Piped(work, SCHEDULES[name]),
            }
            found = turns(work.batch, ways, starter(count), rounds=rounds, turn=turn, warm=warm)
            label = f"{count} workers x {work.microbatches} microbatches, {name}"
            cases.append(
                Case(label, theirs, found, dict.fromkeys(found, work.ideal(name, lengths)))
            )
    alone = ", ".join(f"{1e3 * length:.2f}" for length in lengths)
    where = f"blocks sleep {1e3 * seconds:g} ms a pass, which alone takes {alone}"
    where += f"; torch {torch.__version__}"
    comparison = Comparison("emulated pipelines", where, cases)
    comparison.conclude(file)


if __name__ == "__main__":
    typer.run(main)
