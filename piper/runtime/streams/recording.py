"""When each instruction of a plan began and ended, measured while it runs.

On a CPU a computation is timed where it is called. A communication lasts from the moment at which
its stream takes it up until it is over; messages between two tell nobody when they arrive, and end
when the device has waited for them, which for those it sends is at the end of the step. On a GPU
events on the instruction's stream mark both ends.

Every instruction also opens a range of torch's profiler that carries its program counter, by which
kernels are told to belong to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import record_function

from piper.runtime.pending import BoundInstruction, Pending


class Measured(NamedTuple):
    """One instruction: its index in the plan, and seconds on a clock that the processes of one
    machine share."""

    pc: int
    start: float
    end: float


class Recorder:
    """What one device's instructions took, since it was last asked."""

    def __init__(self, device: int, now: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._now = now
        self._found: list[Measured] = []

    def wrapped(self, execute: BoundInstruction, pc: int) -> BoundInstruction:
        """``execute``, timed."""
        now, found = self._now, self._found
        label = range_name(self._device, pc)

        def timed() -> Pending | None:
            start = now()
            with record_function(label):
                begun = execute()
            if begun is None:
                found.append(Measured(pc, start, now()))
                return None

            def over() -> None:
                first, last = begun.span or (start, now())
                found.append(Measured(pc, first, last))

            return begun.then(over)

        return timed

    def take(self) -> tuple[Measured, ...]:
        """All that was measured, in the order of the plan."""
        found = tuple(sorted(self._found))
        self._found.clear()
        return found


class CudaRecorder(Recorder):
    """The same with events on CUDA streams: ``wrapped`` is called inside the instruction's."""

    def __init__(self, device: int, where: torch.device) -> None:
        super().__init__(device)
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._where = where
        torch.cuda.synchronize(where)
        self._base = _event()
        torch.cuda.synchronize(where)
        self._base_time = time.monotonic()

    def wrapped(self, execute: BoundInstruction, pc: int) -> BoundInstruction:
        """``execute``, timed."""
        events = self._events
        label = range_name(self._device, pc)

        def timed() -> Pending | None:
            start = _event()
            with record_function(label):
                begun = execute()
            if begun is None:
                events.append((pc, start, _event()))
                return None
            return begun.then(lambda: events.append((pc, start, _event())))

        return timed

    def take(self) -> tuple[Measured, ...]:
        """All that was measured, in the order of the plan."""
        torch.cuda.synchronize(self._where)
        base, first = self._base, self._base_time
        found = [
            Measured(
                pc,
                first + base.elapsed_time(start) / 1e3,
                first + base.elapsed_time(end) / 1e3,
            )
            for pc, start, end in self._events
        ]
        self._events.clear()
        return tuple(sorted(found))


def recorder_for(device: int, where: torch.device) -> Recorder:
    """What times the instructions of a device that computes on ``where``."""
    return CudaRecorder(device, where) if where.type == "cuda" else Recorder(device)


_PREFIX = "piper "


def range_name(device: int, pc: int) -> str:
    """What torch's profiler calls an instruction."""
    return f"{_PREFIX}{device} {pc}"


def range_of(name: str) -> tuple[int, int] | None:
    """The device and the program counter that ``range_name`` wrote; None if it is another range."""
    parts = name.removeprefix(_PREFIX).split(" ")
    if not name.startswith(_PREFIX) or len(parts) != 2 or not all(map(str.isdigit, parts)):
        return None
    return int(parts[0]), int(parts[1])


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
