"""The answers of a cost model as plain data. A program is saved with the answers, not the model:
so any model works, and loading a file runs no code from it."""

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
    """A cost model that repeats the recorded answers of another one."""

    groups: tuple[Group, ...]
    """The device groups of the recorded questions."""
    seconds: tuple[tuple[Task, int, float], ...]
    """A task, the index of its group in ``groups``, and the seconds."""

    def __post_init__(self) -> None:
        if not all(0 <= group < len(self.groups) for _, group, _ in self.seconds):
            raise MalformedError(f"a group number is outside its {len(self.groups)} groups")

    @cached_property
    def _known(self) -> Mapping[tuple[Task, Group], float]:
        return {(task, self.groups[group]): seconds for task, group, seconds in self.seconds}

    def duration(self, task: Task, devices: Group) -> float | None:
        return self._known.get((task, devices))


class Asked:
    """Wraps a cost model and records its answers."""

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
