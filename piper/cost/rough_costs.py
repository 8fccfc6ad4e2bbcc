"""Rough seconds of tasks from three figures, to order what a strategy leaves open."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from piper.base.errors import PiperError
from piper.cost.fallback import Fallback
from piper.cost.recorded import Recorded
from piper.cost.tasks import Task, TaskKind
from piper.ir.ops import Group


@dataclass(frozen=True, slots=True)
class Costs:
    """The speeds of compute and communication: a cost model that knows every task."""

    flops_per_second: float = 200e12
    bytes_per_second: float = 50e9
    overhead: float = 5e-6
    recorded: Recorded | None = None
    """Measured times, which take precedence where they exist: ``profile.recorded``."""

    def __post_init__(self) -> None:
        speeds = self.flops_per_second, self.bytes_per_second
        if not all(speed > 0 for speed in speeds) or not 0 <= self.overhead < math.inf:
            raise PiperError(f"{self}: speeds must be positive, and overhead not negative")
        if not isinstance(self.recorded, Recorded | None):
            raise PiperError(f"recorded={self.recorded!r} must be piper.Recorded, or None")

    def duration(self, task: Task, devices: Group) -> float | None:
        if self.recorded is not None:
            return Fallback(self.recorded, replace(self, recorded=None)).duration(task, devices)
        match task.kind:
            case TaskKind.PASS:
                return self.overhead + task.flops / self.flops_per_second
            case TaskKind.UPDATE | TaskKind.ADD:
                return self.overhead
            case _:
                return self.overhead + task.nbytes / self.bytes_per_second


def recorded_of(costs: object) -> Recorded | None:
    """The measured times in a cost model, if it has any."""
    return (
        costs.recorded
        if isinstance(costs, Costs)
        else (costs if isinstance(costs, Recorded) else None)
    )
