"""``WorkerGroup``, the interface of a trainer to its devices.

A launcher starts processes and delivers calls; ``WorkerDevice`` says what a device can do. Three
verbs are enough: ``call`` a method of all devices, run something ``once``, ``close``. ``seat`` says
for which devices there are processes: a launch starts the first ones, a switch starts others and
ends some. ``switch`` lets a group that recovers from faults do so within one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from piper.launch.agreement import Agreement
from piper.launch.device.device import WorkerDevice
from piper.launch.device.local_devices import PerDevice
from piper.launch.recovery.fault import Recovery
from piper.program.program import Program
from piper.runtime.feeding import cut

T = TypeVar("T")


class WorkerGroup(Protocol):
    """The devices of a program, wherever they are."""

    @property
    def rank(self) -> int:
        """The rank of this process among the processes with a trainer."""
        ...

    @property
    def trainers(self) -> int:
        """The number of processes with a trainer."""
        ...

    @property
    def agreement(self) -> Agreement | None:
        """Compares the processes with a trainer, if there are several."""
        ...

    @property
    def damaged(self) -> bool:
        """Whether a step failed while it was changing the state."""
        ...

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """The faults from which the devices recovered."""
        ...

    @property
    def devices(self) -> Sequence[int]:
        """The devices that the calls of this process reach: all, or its own under torchrun."""
        ...

    def seat(self, devices: Iterable[int], kind: torch.device) -> None:
        """Have a place for each of ``devices``, and for no other; ``kind`` is the kind of torch
        device of their program. Each can then be called."""
        ...

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a method of ``WorkerDevice`` on every device of ``devices``, and return the answers.
        An argument that is ``Each`` or ``BatchRows`` differs between devices."""
        ...

    def once(self, call: Callable[..., T], *mine: Any) -> T:
        """Run ``call`` in one of the processes with a trainer, and return its result in all of
        them; a PiperError is raised in all of them. Each of ``mine`` becomes a list of what the
        processes passed, by rank. They wait for each other."""
        ...

    def switch(self, program: Program, move: Callable[[WorkerGroup], None]) -> None:
        """Run ``move``, which moves the state of the devices of a group to ``program``."""
        ...

    def running(self, program: Program) -> Program:
        """What the devices run for ``program``: another one while a replica is lost."""
        ...

    def largest(self, number: int) -> int:
        """The maximum of ``number`` over the processes with a trainer."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """End all devices; ``error`` is the reason, if training failed."""
        ...


class OneTrainer:
    """The part of a worker group that is the same wherever one process has the only trainer."""

    rank = 0
    trainers = 1
    agreement = None
    recoveries: Sequence[Recovery] = ()

    def once(self, call: Callable[..., T], *mine: Any) -> T:
        return call(*([one] for one in mine))

    def switch(self: WorkerGroup, program: Program, move: Callable[[WorkerGroup], None]) -> None:
        move(self)

    def running(self, program: Program) -> Program:
        return program

    def largest(self, number: int) -> int:
        return number


@dataclass(frozen=True, slots=True)
class Each(PerDevice):
    """An argument that differs between devices. If several processes have a trainer, all get
    theirs from rank 0."""

    of: Callable[[int], Any]
    own: Any = None
    """A part of the argument that every process has itself, so that it is not sent."""

    def part(self, device: WorkerDevice) -> Any:
        return self.of(device.number)


@dataclass(frozen=True, slots=True)
class BatchRows(PerDevice):
    """The rows of a batch for each device, in a training step or an evaluation."""

    program: Program
    batch: Sequence[Tensor]
    numbers: Sequence[int] | None = None
    """The numbers of the rows in ``batch``, if it does not have all."""
    evaluated: bool = False

    def of(self, device: int) -> list[Tensor]:
        step = self.program.steps[self.evaluated]
        return cut(step.plan_of(device), step.code, device, self.batch, self.numbers)

    def part(self, device: WorkerDevice) -> list[Tensor]:
        plan, code = device.loaded.program.steps[self.evaluated]
        return cut(plan, code, device.number, self.batch, self.numbers)


def everyone(group: WorkerGroup, mine: Any) -> list[Any]:
    """What each process with a trainer passed, by rank; all of them must call this."""
    return group.once(list, mine)


def answers_of_all(group: WorkerGroup, mine: Sequence[Any]) -> list[Any]:
    """The answers of all devices, from those of this process's devices."""
    return joined(everyone(group, mine))


def joined(rows: Iterable[Iterable[T]]) -> list[T]:
    """All items of all rows."""
    return [item for row in rows for item in row]
