"""One cost model before another: measured times where they speak, and a model for the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.cost.recorded import Recorded
from piper.cost.tasks import CostModel, Task
from piper.ir.dag.facts import OpCost
from piper.ir.ops import Group


@dataclass(frozen=True, slots=True)
class Fallback:
    """Asks the first model, and the other one for tasks that the first does not know.

    A communication, update or addition beyond the measured sizes of its kind takes the measured
    time nearest in size, and what the other model says of the difference.
    """

    first: CostModel
    otherwise: CostModel

    def duration(self, task: Task, devices: Group) -> float | None:
        known = self.first.duration(task, devices)
        if known is not None:
            return known
        seconds = self.otherwise.duration(task, devices)
        near = self.first.nearest(task) if isinstance(self.first, Recorded) else None
        if near is None or not seconds:
            return seconds
        there = self.otherwise.duration(_of_size(task, near.nbytes), devices)
        if not there:
            return seconds
        if task.nbytes < near.nbytes:
            return near.seconds * seconds / there
        return near.seconds + max(0.0, seconds - there)


def _of_size(task: Task, nbytes: int) -> Task:
    """``task`` for another number of bytes."""
    kernels = (
        OpCost(each.count, each.flops, each.nbytes * nbytes // task.nbytes) for each in task.kernels
    )
    return replace(task, nbytes=nbytes, kernels=tuple(kernels))
