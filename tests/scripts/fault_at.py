"""Faults at instructions, in a worker that imports this module (``launch(imports=...)``).

The environment variable ``FAULT_AT`` says which, each as "device step instruction kind file", with
semicolons between them. A fault happens once, when ``file`` can be made; without a file it happens
each time.
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
    """A fault before one instruction of one step."""

    def __init__(self, text: str) -> None:
        device, step, pc, kind, *once = text.split()
        self.place = int(device), int(pc)
        self.step = int(step)
        self._kind, self._once = Fault[kind], "".join(once)

    def happen(self) -> None:
        """Make the fault, unless it has happened."""
        try:
            if self._once:
                os.close(os.open(self._once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        _happen(self._kind)


class _Faults:
    """An observer that makes faults."""

    def __init__(self, texts: str) -> None:
        self._all = [_At(text) for text in texts.split(";")]

    def wrapped(
        self, execute: BoundInstruction, pc: int, context: ExecutionContext
    ) -> BoundInstruction:
        mine = [fault for fault in self._all if fault.place == (context.device, pc)]
        if not mine:
            return execute

        def run() -> Any:
            for fault in mine:
                if fault.step == context.state.steps:
                    fault.happen()
            return execute()

        return run


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


def _faulty(load: Callable[..., Any], faults: _Faults) -> Callable[..., Any]:
    def loaded(self: Executor, plan: Any, code: Any, observer: Any = None) -> Any:
        return load(self, plan, code, observer or faults)

    return loaded


if "FAULT_AT" in os.environ:
    Executor.load = _faulty(Executor.load, _Faults(os.environ["FAULT_AT"]))  # type: ignore[method-assign]
