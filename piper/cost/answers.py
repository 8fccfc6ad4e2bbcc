"""The answers of a cost model as plain data. A program is saved with the answers, not the model:
so any model works, and loading a file runs no code from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from piper.cost.tasks import CostModel, Task
from piper.ir.ops import Group


@dataclass(frozen=True)
class Answers:
    """A cost model that repeats the recorded answers of another one."""

    seconds: Mapping[str, float]
    """By a digest of the task and its devices."""

    def duration(self, task: Task, devices: Group) -> float | None:
        return self.seconds.get(_digest(task, devices))


class Asked:
    """Wraps a cost model and records its answers."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._said: dict[str, float] = {}

    def duration(self, task: Task, devices: Group) -> float | None:
        seconds = self._model.duration(task, devices)
        if seconds is not None:
            self._said[_digest(task, devices)] = seconds
        return seconds

    @property
    def answers(self) -> Answers:
        return Answers(self._said)


def _digest(task: Task, devices: Group) -> str:
    return hashlib.blake2b(repr((task, devices)).encode(), digest_size=12).hexdigest()
