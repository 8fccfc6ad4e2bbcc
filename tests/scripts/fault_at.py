"""Faults at instructions, in a worker that imports this module (``launch(imports=...)``).

The environment variable ``FAULT_AT`` says which, each as "device step instruction kind file after",
with semicolons between them. A fault happens once, when ``file`` can be made, and not until the
file ``after`` is there; without ``file`` it happens each time. The faults around a worker find what
they need beside the file (``campaign.py``).

``FAULT_IN`` says the same of calls, each as "device method when kind file after": ``when`` is
"before" or "after" the method, and nothing happens until the file ``after`` is there.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch

from piper.launch.device.device import WorkerDevice
from piper.runtime.context import ExecutionContext
from piper.runtime.executor import BoundInstruction, Executor


class Fault(Enum):
    """What happens to the worker, or around it."""

    KILL = auto()
    STOP = auto()
    EXIT = auto()
    RAISE = auto()
    MEMORY = auto()
    SLOW = auto()
    PARENT = auto()
    """The process whose number is in the file ``parent`` is killed."""
    DISK = auto()
    """The disk at ``disk`` is full."""
    NODE = auto()
    """The machine of a Ray cluster is lost."""


OF_WORKERS = list(Fault)[: Fault.SLOW.value]
"""The faults of one worker."""
FILLER = "filler"
"""The file that fills a disk."""


def chosen(device: int, step: int, pc: int, kind: Fault, once: str = "", after: str = "") -> str:
    """The value of ``FAULT_AT``; ``once`` is a file that does not exist yet."""
    return f"{device} {step} {pc} {kind.name} {once} {after}"


class _At:
    """A fault before one instruction of one step."""

    def __init__(self, text: str) -> None:
        device, step, pc, kind, *files = text.split()
        self.place = int(device), int(pc)
        self.step = int(step)
        self._kind, self._once, self._after = Fault[kind], "".join(files[:1]), files[1:]

    def happen(self) -> None:
        """Make the fault, unless it has happened or is not due yet."""
        if not all(map(os.path.exists, self._after)):
            return
        try:
            if self._once:
                os.close(os.open(self._once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        _happen(self._kind, Path(self._once).parent)


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


def _happen(kind: Fault, beside: Path) -> None:
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
        case Fault.PARENT:
            os.kill(int((beside / "parent").read_text()), signal.SIGKILL)
        case Fault.DISK:
            fill(beside / "disk" / FILLER)
        case Fault.NODE:
            os.kill(_raylet(os.getpid()), signal.SIGKILL)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (2**16, 1):
            try:
                while file.write(b"0" * size):
                    pass
            except OSError:
                continue


def _raylet(process: int) -> int:
    """The nearest ancestor of a process that is a node of a Ray cluster."""
    while b"raylet/raylet" not in Path(f"/proc/{process}/cmdline").read_bytes():
        stat = Path(f"/proc/{process}/stat").read_text()
        process = int(stat.rpartition(")")[2].split()[1])
    return process


def _faulty(load: Callable[..., Any], faults: _Faults) -> Callable[..., Any]:
    def loaded(self: Executor, plan: Any, code: Any, observer: Any = None) -> Any:
        return load(self, plan, code, observer or faults)

    return loaded


def in_call(device: int, method: str, when: str, kind: Fault, once: str, after: str = "") -> str:
    """The value of ``FAULT_IN``."""
    return f"{device} {method} {when} {kind.name} {once} {after}"


def _fail_in(text: str) -> None:
    device, name, when, kind, once, *after = text.split()
    method = getattr(WorkerDevice, name)

    def happen(own: WorkerDevice) -> None:
        there = all(Path(path).exists() for path in after)
        if own.number == int(device) and there and not Path(once).exists():
            Path(once).touch()
            _happen(Fault[kind], Path(once).parent)

    @functools.wraps(method)
    def failing(own: WorkerDevice, *arguments: Any) -> Any:
        if when == "before":
            happen(own)
        answer = method(own, *arguments)
        if when == "after":
            happen(own)
        return answer

    setattr(WorkerDevice, name, failing)


if "FAULT_IN" in os.environ:
    for one in os.environ["FAULT_IN"].split(";"):
        _fail_in(one)
if "FAULT_AT" in os.environ:
    Executor.load = _faulty(Executor.load, _Faults(os.environ["FAULT_AT"]))  # type: ignore[method-assign]
