"""What a cost model said, as plain data. A saved program needs no more of its model: so any model
can be saved with it, and nothing of a file is run when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from piper.base.codec import Numbered
from piper.base.reading import MalformedError
from piper.cost.tasks import CostModel, Task
from piper.ir.ops import Group


@dataclass(frozen=True)
class Answers:
    """A cost model that knows the tasks that another was asked for."""

    groups: tuple[Group, ...]
    """Devices that were asked about."""
    seconds: tuple[tuple[Task, int, float], ...]
    """Of a task on a group, which is given by its place."""

    def __post_init__(self) -> None:
        if not all(0 <= group < len(self.groups) for _, group, _ in self.seconds):
            raise MalformedError(f"it speaks of a group, of which there are {len(self.groups)}")

    @cached_property
    def _known(self) -> Mapping[tuple[Task, Group], float]:
        return {(task, self.groups[group]): seconds for task, group, seconds in self.seconds}

    def duration(self, task: Task, devices: Group) -> float | None:
        return self._known.get((task, devices))


class Asked:
    """A cost model, and what it says."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._said: dict[tuple[Task, Group], float] = {}

    def duration(self, task: Task, devices: Group) -> float | None:
        seconds = self._model.duration(task, devices)
        if seconds is not None:
            self._said[task, devices] = seconds
        return seconds

    @property
    def answers(self) -> Answers:
        groups = Numbered()
        rows = tuple((task, groups.number(ds), s) for (task, ds), s in self._said.items())
        return Answers(tuple(groups.items), rows)
