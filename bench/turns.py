"""Sides that train in turns, timed: what the comparisons with others have in common.

All take turns in one run, so that a noisy machine hits all of them; the workers of the others wait
meanwhile. A step's time is taken by the caller, from before it sends each worker its rows until all
have answered. Beside it stands the time that a worker's threads really ran, which says more where
others use the cores too, and the most memory that a worker held.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from peers import WORKERS, Work
from torch import Tensor

import piper
from piper.launch.processes import ProcessCrew
from piper.models import lm_loss

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""For every worker, before it imports torch."""
KEEPING = {"MIMALLOC_PURGE_DELAY": "-1"}
"""Torch's allocator, where it is mimalloc (as on 64-bit ARM), gives no memory back."""
TOLERANCE = 1e-5
"""Of losses, relative."""

Way = TypeVar("Way")


class Side(Protocol):
    """Two workers that train."""

    pids: list[int]

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train on a batch; the loss."""
        ...


class Launched:
    """The work under a strategy of ours, on worker processes."""

    def __init__(self, work: Work, strategy: piper.Strategy, stack: contextlib.ExitStack) -> None:
        """``stack`` ends its workers."""
        x, y = work.batch(0)
        program = piper.compile(
            work.model(),
            strategy,
            inputs=(x,),
            targets=(y,),
            loss=lm_loss,
            optimizer=work.optimizer,
            costs=piper.Cluster.of("CPU", WORKERS).costs(),
        )
        self._trainer = stack.enter_context(piper.launch(program, on="processes", threads=1))
        crew = self._trainer._crew
        assert isinstance(crew, ProcessCrew)
        self.pids = [worker.process.pid for worker in crew._workers]

    def step(self, x: Tensor, y: Tensor) -> float:
        return float(self._trainer.step(x, y).loss)


@dataclass(slots=True)
class Found:
    """What one side did."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    """Seconds that a worker's threads ran, of each step."""
    resident: int = 0
    """The most bytes that a worker held."""

    def take(self, side: Side, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
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


def measure(
    work: Work,
    ways: Iterable[Way],
    start: Callable[[Way, contextlib.ExitStack], Side],
    *,
    rounds: int,
    turn: int,
    warm: int,
) -> dict[Way, Found]:
    """All ``ways``, each started by ``start`` and ended by the stack, ``turn`` steps each, round
    after round."""
    with contextlib.ExitStack() as stack:
        sides = {way: start(way, stack) for way in ways}
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
        for way, side in sides.items():
            found[way].resident = max(map(_resident, side.pids))
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


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def ratio(mine: Iterable[float], theirs: Iterable[float]) -> float:
    """The median over steps, of which each was measured in the same round."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def difference(found: Iterable[Found]) -> float:
    """The largest relative difference between the losses of any two, in any step."""
    losses = torch.tensor([one.losses for one in found], dtype=torch.float64)
    return float(((losses.amax(0) - losses.amin(0)) / losses.abs().amax(0)).max())
