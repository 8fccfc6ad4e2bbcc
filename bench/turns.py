"""Sides that train in turns, timed: what all comparisons have in common.

All take turns in one run, so that a noisy machine hits all of them; the others wait meanwhile. A
step's time is taken by the caller, from before it hands over the batch until the loss is there.
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
        """Train on a batch; the loss."""
        ...

    def settle(self) -> None:
        """Warm from now on."""
        ...

    def running(self) -> float:
        """Seconds that each of its processes has really run so far, on average."""
        ...

    def peak(self) -> int:
        """The most bytes that one of its processes held."""
        ...


@dataclass(slots=True)
class Found:
    """What one side did."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    """Seconds that its processes really ran, of each step: says more where others use the cores
    too."""
    memory: int = 0
    """The most bytes that one of its processes held."""
    host: list[float] = field(default_factory=list)
    """Seconds until the call that takes a step returned, of each step, where kernels run on."""
    by_rank: list[int] = field(default_factory=list)
    """The most bytes that each of its processes held, where that is known."""
    predicted: list[int] = field(default_factory=list)
    """The same, as the compiler predicted it."""

    def take(self, side: Side, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Let ``side`` train on ``batches``."""
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
    """All sides, each started by ``start`` and ended by the stack, ``turn`` steps each, round after
    round, on the batches that ``batch`` gives by number."""
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
