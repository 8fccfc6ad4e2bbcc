"""The kernels of each instruction, from torch's profiler.

On a GPU, a kernel belongs to the instruction whose host code launched it. On a CPU, the operations
that an instruction calls count as its kernels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from piper.runtime.streams.recording import range_of

T = TypeVar("T")
_NANO = 1e-9


class Kernel(NamedTuple):
    """One kernel of an instruction. ``start`` and ``end`` are seconds on the profiler's clock."""

    device: int
    pc: int
    name: str
    row: str
    """The CUDA stream it ran on, or "host"."""
    start: float
    end: float


class Range(NamedTuple):
    """The host's time in one instruction, in seconds on the profiler's clock."""

    start: float
    end: float
    device: int
    pc: int


def with_kernels(
    run: Callable[[], T], where: torch.device
) -> tuple[T, list[Range], Iterator[Kernel]]:
    """The result of ``run``, the ranges of all instructions in it, and their kernels."""
    activities = [ProfilerActivity.CPU]
    if where.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiler:
        result = run()
    results: Any = profiler.profiler
    events = list(results.kineto_results.events())
    ranges = sorted(_ranges(events))
    return result, ranges, _kernels(events, ranges, gpu=where.type == "cuda")


def _ranges(events: list[Any]) -> Iterator[Range]:
    for event in events:
        known = range_of(event.name())
        if known is not None and event.device_type() == DeviceType.CPU:
            yield Range(*_times(event), *known)


def _kernels(events: list[Any], ranges: list[Range], *, gpu: bool) -> Iterator[Kernel]:
    starts = [one.start for one in ranges]
    host = [e for e in events if e.device_type() == DeviceType.CPU and range_of(e.name()) is None]
    if not gpu:
        covered = 0.0
        for event in sorted(host, key=lambda e: (e.start_ns(), -e.duration_ns())):
            start, end = _times(event)
            inside = _inside(ranges, starts, start)
            if inside is not None and start >= covered:  # not nested in a previous operation
                covered = end
                yield Kernel(inside.device, inside.pc, event.name(), "host", start, end)
        return
    launched = {e.correlation_id(): e.start_ns() * _NANO for e in host}
    for event in events:
        if event.device_type() != DeviceType.CUDA or range_of(event.name()) is not None:
            continue
        start, end = _times(event)
        inside = _inside(ranges, starts, launched.get(event.linked_correlation_id(), -1.0))
        if inside is not None:
            row = f"CUDA stream {event.device_resource_id()}"
            yield Kernel(inside.device, inside.pc, event.name(), row, start, end)


def _inside(ranges: list[Range], starts: list[float], moment: float) -> Range | None:
    """The instruction that the host ran at ``moment``."""
    index = bisect_right(starts, moment) - 1
    return ranges[index] if index >= 0 and moment <= ranges[index].end else None


def _times(event: Any) -> tuple[float, float]:
    start = event.start_ns() * _NANO
    return start, start + event.duration_ns() * _NANO
