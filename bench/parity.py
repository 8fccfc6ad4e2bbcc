"""A step of ours beside a step of torch's own data parallelism, on two worker processes.

One model (a dense transformer), the same weights, batches and AdamW, in fp32; two gloo workers of
one thread, each pinned to a core. Level by level:

    zero=0   mesh(dp=2, zero=0)    DistributedDataParallel
    zero=2   mesh(dp=2, zero=2)    fully_shard, reshard_after_forward=False
    zero=3   mesh(dp=2, zero=3)    fully_shard, reshard_after_forward=True

each in several settings, of which the best counts: the size of buckets, and when gathers begin. How
they are timed stands in turns.py. The losses of all steps must agree: a faster wrong answer fails.

    python bench/parity.py [--microbatches 4] [--level 0] [--rounds 20] [--json FILE]
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
from peers import WORKERS, Peers, Replicated, Sharded, Work
from rich.console import Console
from rich.table import Table
from turns import ENVIRONMENT, KEEPING, TOLERANCE, Launched, Side, difference, measure, ratio

from piper.models import DenseConfig
from piper.strategies import mesh


@dataclass(frozen=True, slots=True)
class Piper:
    """One of our settings."""

    zero: int
    bucket_mb: float

    def __str__(self) -> str:
        return f"piper, buckets of {self.bucket_mb:g} MB"


def started(work: Work, way: Way, stack: contextlib.ExitStack) -> Side:
    if not isinstance(way, Piper):
        return Peers(work, way, stack)
    strategy = mesh(
        dp=WORKERS, zero=way.zero, microbatches=work.microbatches, bucket_mb=way.bucket_mb
    )
    return Launched(work, strategy, stack)


Way = Piper | Replicated | Sharded


def ways(zero: int) -> list[Way]:
    ours = [Piper(zero, size) for size in (25, 4)]
    if zero == 0:
        return [*ours, Replicated(25), Replicated(4)]
    return [*ours, *(Sharded(zero == 3, ahead) for ahead in (False, True))]


def main(
    level: Annotated[list[int] | None, typer.Option(help="ZeRO levels: 0, 2, 3; or all.")] = None,
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = 8,
    dim: Annotated[int, typer.Option(help="Its width, a multiple of 64.")] = 256,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 1024,
    rows: Annotated[int, typer.Option(help="Sequences of a microbatch on each worker.")] = 2,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 1,
    fused: Annotated[bool, typer.Option(help="Whether AdamW is fused, for all.")] = True,
    keep: Annotated[bool, typer.Option(help="Allocators of all keep what is freed.")] = False,
    rounds: Annotated[int, typer.Option(min=3, help="How often each side has its turn.")] = 10,
    turn: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 2,
    warm: Annotated[int, typer.Option(min=1, help="Steps before anything is timed.")] = 3,
    file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare data parallel steps."""
    os.environ |= ENVIRONMENT | (KEEPING if keep else {})
    config = DenseConfig(
        vocab=vocab, dim=dim, layers=layers, heads=dim // 64, mlp_dim=4 * dim, max_seq=seq
    )
    work = Work(config, microbatches, rows, fused)
    title = f"{WORKERS} workers, {microbatches} x {rows} x {seq} tokens each; ratios to their best"
    table = Table(title=title)
    for column in ("zero", "side", "step (s)", "10-90%", "ratio", "running (s)", "ratio"):
        table.add_column(column, justify="left" if column == "side" else "right")
    written: list[dict[str, Any]] = []
    wrong = []
    for zero in level or (0, 2, 3):
        start = partial(started, work)
        found = measure(work, ways(zero), start, rounds=rounds, turn=turn, warm=warm)
        theirs = [one for way, one in found.items() if not isinstance(way, Piper)]
        best = min(theirs, key=lambda one: one.median)
        for way, one in found.items():
            low, high = one.spread
            ratios = ratio(one.seconds, best.seconds), ratio(one.running, best.running)
            table.add_row(
                str(zero),
                str(way),
                f"{one.median:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{ratios[0]:.3f}",
                f"{statistics.median(one.running):.3f}",
                f"{ratios[1]:.3f}",
            )
            written.append({"zero": zero, "side": str(way), "ratios": ratios, **asdict(one)})
        table.add_section()
        apart = difference(found.values())
        print(f"zero={zero}: losses differ by {apart:.1e} at most")
        if not apart <= TOLERANCE:
            wrong.append(f"zero={zero}: losses differ by {apart:.1e}, more than {TOLERANCE:.0e}")
    Console(width=100).print(table)
    if file is not None:
        file.write_text(json.dumps(written, indent=1))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    typer.run(main)
