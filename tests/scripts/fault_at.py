"""Faults at an instruction, in a worker that imports this module (``launch(imports=...)``).

The environment variable ``FAULT_AT`` says which: "device step instruction kind file". The fault
happens once, when ``file`` can be made; without a file it happens each time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch

from piper.runtime.context import ExecutionContext
from piper.runtime.executor import BoundInstruction, Executor


class Fault(Enum):
    """What happens to the worker."""

    KILL = auto()
    STOP = auto()
    EXIT = auto()
    RAISE = auto()
    MEMORY = auto()
    SLOW = auto()


def chosen(device: int, step: int, pc: int, kind: Fault, once: str = "") -> str:
    """The value of ``FAULT_AT``; ``once`` is a file that does not exist yet."""
    return f"{device} {step} {pc} {kind.name} {once}"


class _At:
    """An observer that makes the fault before one instruction of one step."""

    def __init__(self) -> None:
        device, step, pc, kind, *once = os.environ["FAULT_AT"].split()
        self._device, self._step, self._pc = int(device), int(step), int(pc)
        self._kind, self._once = Fault[kind], "".join(once)

    def wrapped(
        self, execute: BoundInstruction, pc: int, context: ExecutionContext
    ) -> BoundInstruction:
        if (context.device, pc) != (self._device, self._pc):
            return execute

        def run() -> Any:
            if context.state.steps == self._step and self._may():
                _happen(self._kind)
            return execute()

        return run

    def _may(self) -> bool:
        if not self._once:
            return True
        try:
            os.close(os.open(self._once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def _happen(kind: Fault) -> None:
    match kind:
        case Fault.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Fault.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Fault.EXIT:
            os._exit(3)
        case Fault.RAISE:
            raise ValueError("told to fail")
        case Fault.MEMORY:
            torch.empty(2**60)
        case Fault.SLOW:
            time.sleep(1.0)


def _faulty(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(self: Executor, plan: Any, code: Any, observer: Any = None) -> Any:
        return load(self, plan, code, observer or _At())

    return loaded


if "FAULT_AT" in os.environ:
    Executor.load = _faulty(Executor.load)  # type: ignore[method-assign]
