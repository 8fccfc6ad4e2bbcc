"""A step of ours beside a step of torch's own data parallelism, on two worker processes.

One model (a dense transformer), the same weights, batches and AdamW, in fp32; two gloo workers of
one thread, each pinned to a core. Level by level:

    zero=0   mesh(dp=2, zero=0)    DistributedDataParallel
    zero=2   mesh(dp=2, zero=2)    fully_shard, reshard_after_forward=False
    zero=3   mesh(dp=2, zero=3)    fully_shard, reshard_after_forward=True

each in several settings, of which the best counts: the size of buckets, and when gathers begin. All
take turns in one run, so that a noisy machine hits all of them; the workers of the others wait
meanwhile. A step's time is taken by the caller, from before it sends each worker its rows until all
have answered. Beside it stands the time that a worker's threads really ran, which says more where
others use the cores too. The losses of all steps must agree: a faster wrong answer fails.

    python bench/parity.py [--microbatches 4] [--level 0] [--rounds 20] [--json FILE]
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peers import WORKERS, Peers, Replicated, Sharded, Work
from rich.console import Console
from rich.table import Table
from torch import Tensor

import piper
from piper.launch.processes import ProcessCrew
from piper.models import DenseConfig, lm_loss
from piper.strategies import mesh

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""For every worker, before it imports torch."""
KEEPING = {"MIMALLOC_PURGE_DELAY": "-1"}
"""Torch's allocator, where it is mimalloc (as on 64-bit ARM), gives no memory back."""
TOLERANCE = 1e-5
"""Of losses, relative."""


@dataclass(frozen=True, slots=True)
class Piper:
    """One of our settings."""

    zero: int
    bucket_mb: float

    def __str__(self) -> str:
        return f"piper, buckets of {self.bucket_mb:g} MB"


class Ours:
    """A launched program."""

    def __init__(self, work: Work, way: Piper, stack: contextlib.ExitStack) -> None:
        """``stack`` ends its workers."""
        x, y = work.batch(0)
        parts, size = work.microbatches, way.bucket_mb
        program = piper.compile(
            work.model(),
            mesh(dp=WORKERS, zero=way.zero, microbatches=parts, bucket_mb=size),
            inputs=(x,),
            targets=(y,),
            loss=lm_loss,
            optimizer=work.optimizer,
        )
        self._trainer = stack.enter_context(piper.launch(program, on="processes", threads=1))
        crew = self._trainer._crew
        assert isinstance(crew, ProcessCrew)
        self.pids = [worker.process.pid for worker in crew._workers]

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train on a batch; the loss."""
        return float(self._trainer.step(x, y).loss)


Way = Piper | Replicated | Sharded


def ways(zero: int) -> list[Way]:
    ours = [Piper(zero, size) for size in (25, 4)]
    if zero == 0:
        return [*ours, Replicated(25), Replicated(4)]
    return [*ours, *(Sharded(zero == 3, ahead) for ahead in (False, True))]


@dataclass(slots=True)
class Found:
    """What one side did."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    """Seconds that a worker's threads ran, of each step."""

    def take(self, side: Ours | Peers, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Let ``side`` train on ``batches``."""
        for x, y in batches:
            before, start = _running(side.pids), time.perf_counter()
            self.losses.append(side.step(x, y))
            self.seconds.append(time.perf_counter() - start)
            self.running.append((_running(side.pids) - before) / WORKERS)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        values = sorted(self.seconds)
        return values[len(values) // 10], values[-len(values) // 10 - 1]


def measure(work: Work, zero: int, rounds: int, turn: int, warm: int) -> dict[Way, Found]:
    """All settings of one level, ``turn`` steps each, round after round."""
    with contextlib.ExitStack() as stack:
        sides = {
            way: Ours(work, way, stack) if isinstance(way, Piper) else Peers(work, way, stack)
            for way in ways(zero)
        }
        found = {way: Found() for way in sides}
        first = [work.batch(i) for i in range(warm)]
        for way, side in sides.items():
            found[way].take(side, first)
            found[way].seconds.clear()
            found[way].running.clear()
            _pin(side.pids)
        for number in range(rounds):
            batches = [work.batch(warm + number * turn + i) for i in range(turn)]
            for way in list(sides)[:: -1 if number % 2 else 1]:
                found[way].take(sides[way], batches)
    return found


def _pin(pids: Iterable[int]) -> None:
    """Each worker on a core of its own, with all threads that it has; later ones inherit it."""
    cores = sorted(os.sched_getaffinity(0))
    for rank, pid in enumerate(pids):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {cores[rank % len(cores)]})


def _running(pids: Iterable[int]) -> float:
    """Seconds that the threads of these processes have run so far, all together."""
    threads = (thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((t / "schedstat").read_text().split()[0]) for t in threads) / 1e9


def ratio(mine: Iterable[float], theirs: Iterable[float]) -> float:
    """The median over steps, of which each was measured in the same round."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def difference(found: Iterable[Found]) -> float:
    """The largest relative difference between the losses of any two, in any step."""
    losses = torch.tensor([one.losses for one in found], dtype=torch.float64)
    return float(((losses.amax(0) - losses.amin(0)) / losses.abs().amax(0)).max())


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
        found = measure(work, zero, rounds, turn, warm)
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
