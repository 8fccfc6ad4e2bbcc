"""Measures the start and end of each instruction while a plan runs.

On a CPU, a computation is timed around its call. A collective lasts from when its stream starts it
until it is done. Point-to-point messages do not report their arrival: they end when the device has
waited for them, which for sends is at the end of the step. On a GPU, events on the instruction's
stream mark both ends.

Every instruction also opens a range of torch's profiler with its program counter. The range assigns
kernels to instructions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import record_function

from piper.runtime.pending import BoundInstruction, Pending


class Measured(NamedTuple):
    """The timing of one instruction: its index in the plan, and seconds on a clock that all
    processes of a machine share."""

    pc: int
    start: float
    end: float


class Recorder:
    """Timings of one device's instructions since the last ``take``."""

    def __init__(self, device: int, now: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._now = now
        self._found: list[Measured] = []

    def wrapped(self, execute: BoundInstruction, pc: int) -> BoundInstruction:
        """``execute``, timed."""
        now, measured = self._now, self._found
        label = range_name(self._device, pc)

        def timed() -> Pending | None:
            start = now()
            with record_function(label):
                begun = execute()
            if begun is None:
                measured.append(Measured(pc, start, now()))
                return None

            def over() -> None:
                first, last = begun.span or (start, now())
                measured.append(Measured(pc, first, last))

            return begun.then(over)

        return timed

    def take(self) -> tuple[Measured, ...]:
        """All timings since the last call, in the order of the plan."""
        measured = tuple(sorted(self._found))
        self._found.clear()
        return measured


class CudaRecorder(Recorder):
    """A recorder with CUDA events. A wrapped instruction runs with its own stream as the current
    one."""

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
        """All timings since the last call, in the order of the plan."""
        torch.cuda.synchronize(self._where)
        base, first = self._base, self._base_time
        measured = [
            Measured(
                pc,
                first + base.elapsed_time(start) / 1e3,
                first + base.elapsed_time(end) / 1e3,
            )
            for pc, start, end in self._events
        ]
        self._events.clear()
        return tuple(sorted(measured))


def recorder_for(device: int, where: torch.device) -> Recorder:
    """A recorder for a device that computes on ``where``."""
    return CudaRecorder(device, where) if where.type == "cuda" else Recorder(device)


_PREFIX = "piper "


def range_name(device: int, pc: int) -> str:
    """The name of an instruction's range in torch's profiler."""
    return f"{_PREFIX}{device} {pc}"


def range_of(name: str) -> tuple[int, int] | None:
    """The device and program counter in a ``range_name``; None for any other name."""
    parts = name.removeprefix(_PREFIX).split(" ")
    if not name.startswith(_PREFIX) or len(parts) != 2 or not all(map(str.isdigit, parts)):
        return None
    return int(parts[0]), int(parts[1])


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
