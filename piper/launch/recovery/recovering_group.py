"""A worker group that replaces workers which die, fail or hang, and goes on as if they had not.

It copies the state from time to time, and notes every later call that changes the state. After a
fault a policy loads the program again, or another that trains the same. All devices read the copy,
the noted calls are made again, and then the one that failed. A step is a function of the state and
the batch, so the losses are those of a run without faults, bit for bit under the same program. A
switch begins with a copy, which the next program continues from, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from piper.base.errors import PiperError, WorkerError, warn
from piper.launch.device.device import WorkerDevice
from piper.launch.device.worker_group import BatchRows, Each, OneTrainer, WorkerGroup
from piper.launch.messages.calling_group import CallingGroup
from piper.launch.recovery.fault import Recovery
from piper.launch.recovery.mirror import Mirror
from piper.launch.recovery.policy import Policy
from piper.program.program import Program

T = TypeVar("T")

_STEPS = (WorkerDevice.step, WorkerDevice.profile)
_CHANGING = (
    *_STEPS,
    WorkerDevice.restore,
    WorkerDevice.read_part,
    WorkerDevice.swap_averages,
    WorkerDevice.begin_part,
)
"""Methods that change what a device holds."""
_COPIED = (*_STEPS, WorkerDevice.begin_part)
"""Methods before which the state is copied, if a copy is due. A background save is made again from
a copy: without one, the state would be the first one."""


class RecoveringGroup(OneTrainer):
    """A group of worker processes that outlives faults."""

    damaged = False  # a failed step is undone

    def __init__(self, group: CallingGroup, program: Program, policy: Policy) -> None:
        """``group`` runs ``program``; ``policy`` answers its faults."""
        self._group = group
        self._policy = policy
        self._program = program
        self._running = program
        """What the devices run: the program, or another that trains the same."""
        self._mirror = Mirror(group, group.options.mirror)
        self._since: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        """The calls since the last copy that changed the state."""
        self._is_saving = False
        """Whether a background save is under way, for which a call since the last copy is kept."""
        self._intact = True
        """Whether what devices keep of a call that fails now is the state before the lost call."""
        self._restarts = group.options.restarts
        self.recoveries = self._recoveries = list[Recovery]()

    @property
    def devices(self) -> list[int]:
        return self._group.devices

    def seat(self, devices: Iterable[int], kind: torch.device) -> None:
        self._group.seat(devices, kind)

    def close(self, error: BaseException | None = None) -> None:
        self._group.close(error)

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        answers = self._recovered(lambda: self._make(method, *arguments))
        if method in _CHANGING:
            self._since.append((method, tuple(_kept(x) for x in arguments)))
        if method in (WorkerDevice.begin_part, WorkerDevice.written_part):
            self._is_saving = method is WorkerDevice.begin_part
        if method is WorkerDevice.read_part:  # its files may be removed before a fault
            self._mirror.expire()
        return answers

    def switch(self, program: Program, move: Callable[[WorkerGroup], None]) -> None:
        if self._since or self._mirror.is_empty:
            self._recovered(lambda: self._copy(needed=True))
        self._recovered(lambda: move(self._group))
        self._program = self._running = program

    def running(self, program: Program) -> Program:
        return self._running if program is self._program else program

    def _make(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        if method in _COPIED and self._mirror.is_due and not self._is_saving:
            self._copy(needed=self._mirror.is_empty)
        return self._group.call(method, *self._adapted(method, arguments))

    def _adapted(self, method: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """``arguments``, which are for the program, for the one that runs."""
        running = self._running
        if method is WorkerDevice.begin_part and running is not self._program:
            return [arguments[0], Each(lambda device: running.saving.plan_of(device))]
        return [replace(x, program=running) if isinstance(x, BatchRows) else x for x in arguments]

    def _copy(self, *, needed: bool) -> None:
        """Copy the state: the calls until now need not be made again."""
        why = self._mirror.copy(self._program)
        if why is None:
            self._since.clear()
        elif needed:
            raise PiperError(f"the state cannot be copied, as restarts= needs it: {why}")
        else:
            warn(f"the state cannot be copied now, so a fault repeats more steps: {why}")

    def _recovered(self, call: Callable[[], T]) -> T:
        """The result of ``call``, repeated after each fault."""
        last = None
        while True:
            self._intact = True
            try:
                return call()
            except WorkerError as error:
                fault: WorkerError | None = error
            while fault is not None:
                if not self._restarts or (_cause(fault) == last and not fault.outside):
                    self._group.end()
                    raise fault
                last = _cause(fault)
                fault = self._recover(fault)

    def _recover(self, fault: WorkerError) -> WorkerError | None:
        """Bring all devices to the state in which ``fault`` found them; returns another fault that
        happened meanwhile."""
        begun, self._restarts = time.monotonic(), self._restarts - 1
        try:
            answer = self._policy.answer(
                self._group, self._program, self._running, intact=self._intact
            )
            self._running, self._intact = answer.program, False
            new = tuple(self._group.started)
            repeated = [] if answer.keeps_state and not self._is_saving else self._since
            if repeated is self._since and not self._mirror.is_empty:
                self._mirror.restore()
            for method, arguments in repeated:
                self._group.call(method, *self._adapted(method, arguments))
        except WorkerError as error:
            return error
        except BaseException:
            self._group.end()
            raise
        why = str(fault).splitlines()[0]
        lost = answer.without
        seconds = time.monotonic() - begun
        self._recoveries.append(Recovery(why, new, len(repeated), seconds, lost))
        left, given = self._restarts, self._group.options.restarts
        how = f" without devices {', '.join(map(str, lost))}" if lost else ""
        warn(f"{why}; training continues{how} ({left} left of restarts={given})")
        return None


def _cause(fault: WorkerError) -> str:
    """What failed. If it fails again at once, the reason is in the program, unless it is known to
    come from outside."""
    return str(fault).splitlines()[0]


def _kept(argument: Any) -> Any:
    """An argument that does not change when the caller's tensors do."""
    if isinstance(argument, BatchRows):
        return replace(argument, batch=[x.clone() for x in argument.batch])
    if isinstance(argument, dict):
        return {k: x.clone() if isinstance(x, Tensor) else x for k, x in argument.items()}
    return argument
