"""Timed sides that train in turns: shared by all comparisons.

All sides take turns in one run, so that a noisy machine affects all of them; the others wait
meanwhile. The caller times a step, from before it passes the batch until it has the loss.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

Make = TypeVar("Make")


class Side(Protocol):
    """Something that trains."""

    def step(self, x: Tensor, y: Tensor) -> float:
        """Train on a batch and return the loss."""
        ...

    def settle(self) -> None:
        """Called at the end of warm-up."""
        ...

    def running(self) -> float:
        """CPU seconds so far, averaged over its processes."""
        ...

    def peak(self) -> int:
        """The largest peak memory of its processes, in bytes."""
        ...


@dataclass(slots=True)
class Found:
    """The measurements of one side."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    """CPU seconds of each step, averaged over the processes: more reliable than ``seconds`` when
    other programs use the cores."""
    memory: int = 0
    """The largest peak memory of its processes, in bytes."""
    host: list[float] = field(default_factory=list)
    """Seconds of each step until its call returns, where kernels run asynchronously."""
    by_rank: list[int] = field(default_factory=list)
    """The peak memory of each process in bytes, where known."""
    predicted: list[int] = field(default_factory=list)
    """The compiler's prediction of ``by_rank``."""

    def take(self, side: Side, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Train ``side`` on ``batches`` and record each step."""
        for x, y in batches:
            before, start = side.running(), time.perf_counter()
            self.losses.append(side.step(x, y))
            self.seconds.append(time.perf_counter() - start)
            self.running.append(side.running() - before)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        values = sorted(self.seconds)
        tenth = len(values) // 10
        return values[tenth], values[-1 - tenth]


def turns(
    batch: Callable[[int], tuple[Tensor, Tensor]],
    sides: Mapping[str, Make],
    start: Callable[[Make, contextlib.ExitStack], Side],
    *,
    rounds: int,
    turn: int,
    warm: int,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Found]:
    """Run all sides in rounds, ``turn`` steps each per round. ``start`` starts a side, the stack
    ends it, and ``batch`` gives the batch of a number."""
    with contextlib.ExitStack() as stack:
        ready: dict[str, Side] = {}
        found = {name: Found() for name in sides}
        for name, make in sides.items():
            tell(f"{name}: starts")
            side = ready[name] = start(make, stack)
            found[name].take(side, [batch(i) for i in range(warm)])
            found[name].seconds.clear()
            found[name].running.clear()
            side.settle()
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            batches = [batch(warm + number * turn + i) for i in range(turn)]
            for name in list(sides)[:: -1 if number % 2 else 1]:
                found[name].take(ready[name], batches)
        for name, side in ready.items():
            found[name].memory = side.peak()
    return found
