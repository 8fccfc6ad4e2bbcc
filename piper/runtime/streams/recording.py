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
from typing import Any, NamedTuple

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

    def __init__(self, device: int, now: Callable[[], Any] = time.monotonic) -> None:
        self._device = device
        self._now = now
        self._timings: list[tuple[int, Any, Any]] = []

    def wrapped(self, execute: BoundInstruction, pc: int, context: object) -> BoundInstruction:
        """``execute``, timed."""
        now, timings = self._now, self._timings
        label = range_name(self._device, pc)

        def timed() -> Pending | None:
            start = now()
            with record_function(label):
                begun = execute()
            if begun is None:
                timings.append((pc, start, now()))
                return None

            def over() -> None:
                timings.append((pc, *(begun.span or (start, now()))))

            return begun.then(over)

        return timed

    def take(self) -> tuple[Measured, ...]:
        """All timings since the last call, in the order of the plan."""
        rows = (Measured(pc, *map(self._seconds, times)) for pc, *times in self._timings)
        measured = tuple(sorted(rows))
        self._timings.clear()
        return measured

    def _seconds(self, moment: Any) -> float:
        seconds: float = moment
        return seconds


class CudaRecorder(Recorder):
    """A recorder with CUDA events. A wrapped instruction runs with its own stream as the current
    one."""

    def __init__(self, device: int, where: torch.device) -> None:
        super().__init__(device, _event)
        self._where = where
        torch.cuda.synchronize(where)
        self._base = _event()
        torch.cuda.synchronize(where)
        self._base_time = time.monotonic()

    def take(self) -> tuple[Measured, ...]:
        torch.cuda.synchronize(self._where)
        return super().take()

    def _seconds(self, moment: Any) -> float:
        return self._base_time + self._base.elapsed_time(moment) / 1e3


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
