"""A step of ours beside the same schedule of ``torch.distributed.pipelining``, on two workers.

One dense transformer (8 blocks, width 256, sequence 128, vocabulary 1,024), cut at the same places,
the same weights, batches and AdamW, fp32; two gloo workers of one thread, each pinned to a core:

    1F1B, interleaved 1F1B, ZB-V, DualPipeV, each against torch's own; then our best against theirs

Torch's gets the shapes of what is sent, as its documentation recommends. How they are timed stands
in turns.py. The losses of all steps must agree: a faster wrong answer fails.

    python bench/schedules.py [--microbatches 8] [--microbatches 16] [--rounds 10] [--json FILE]
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from peers import WORKERS, Peers, Piped, Work
from rich.console import Console
from rich.table import Table
from turns import ENVIRONMENT, KEEPING, TOLERANCE, Found, Launched, Side, difference, measure, ratio

from piper.models import DenseConfig
from piper.strategies import mesh

SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Ours, and what torch calls the same."""


@dataclass(frozen=True, slots=True)
class Ours:
    """One of our schedules."""

    schedule: str

    def __str__(self) -> str:
        return f"piper {self.schedule}"


Way = Ours | Piped


def started(work: Work, way: Way, stack: contextlib.ExitStack) -> Side:
    if isinstance(way, Piped):
        return Peers(work, way, stack)
    stages = Piped(SCHEDULES[way.schedule]).stages
    strategy = mesh(
        pp=WORKERS,
        schedule=way.schedule,
        microbatches=work.microbatches,
        by=[work.config.layers // stages] * stages,
    )
    return Launched(work, strategy, stack)


def main(
    microbatches: Annotated[list[int] | None, typer.Option(help="Of a step: 8 and 16.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="Ours, by name; or all.")] = None,
    layers: Annotated[int, typer.Option(help="Blocks, a multiple of 4.")] = 8,
    dim: Annotated[int, typer.Option(help="Width, a multiple of 64.")] = 256,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 1024,
    rows: Annotated[int, typer.Option(help="Sequences of half a microbatch.")] = 1,
    fused: Annotated[bool, typer.Option(help="Whether AdamW is fused, for all.")] = True,
    keep: Annotated[bool, typer.Option(help="Allocators of all keep what is freed.")] = False,
    rounds: Annotated[int, typer.Option(min=3, help="How often each side has its turn.")] = 8,
    turn: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 2,
    warm: Annotated[int, typer.Option(min=1, help="Steps before anything is timed.")] = 3,
    file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare pipelines."""
    os.environ |= ENVIRONMENT | (KEEPING if keep else {})
    config = DenseConfig(
        vocab=vocab, dim=dim, layers=layers, heads=dim // 64, mlp_dim=4 * dim, max_seq=seq
    )
    console = Console(width=110)
    written: list[dict[str, Any]] = []
    for count in microbatches or (8, 16):
        work = Work(config, count, rows, fused)
        found: dict[Way, Found] = {}
        for name in schedule or SCHEDULES:
            ways: list[Way] = [Ours(name), Piped(SCHEDULES[name])]
            with console.status(f"{count} microbatches, {name}"):
                start = partial(started, work)
                found |= measure(work, ways, start, rounds=rounds, turn=turn, warm=warm)
        console.print(_table(work, found))
        written += [{"microbatches": count, "side": str(w), **asdict(x)} for w, x in found.items()]
        apart = difference(found.values())
        console.print(f"losses differ by {apart:.1e} at most; {_best(found)}")
        if not apart <= TOLERANCE:
            sys.exit(f"losses differ by {apart:.1e}, more than {TOLERANCE:.0e}")
    if file is not None:
        file.write_text(json.dumps(written, indent=1))


def _table(work: Work, found: dict[Way, Found]) -> Table:
    title = (
        f"{WORKERS} workers, {work.microbatches} microbatches of {WORKERS * work.rows} sequences"
    )
    table = Table(title=title)
    for column in ("side", "step (s)", "10-90%", "ratio", "running (s)", "ratio", "MiB", "ratio"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for mine, other in zip(list(found)[::2], list(found)[1::2], strict=True):
        theirs = found[other]
        for way in (mine, other):
            one = found[way]
            low, high = one.spread
            table.add_row(
                str(way),
                f"{one.median:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{ratio(one.seconds, theirs.seconds):.3f}",
                f"{statistics.median(one.running):.3f}",
                f"{ratio(one.running, theirs.running):.3f}",
                f"{one.resident / 2**20:,.0f}",
                f"{one.resident / theirs.resident:.3f}",
            )
        table.add_section()
    return table


def _best(found: dict[Way, Found]) -> str:
    ours = min((x for w, x in found.items() if isinstance(w, Ours)), key=lambda x: x.median)
    theirs = min((x for w, x in found.items() if isinstance(w, Piped)), key=lambda x: x.median)
    return f"our best / their best {ours.median / theirs.median:.3f}"


if __name__ == "__main__":
    typer.run(main)
