"""A measured step in one process: with torch's profiler around it if kernels are asked for.

The profiler has a clock of its own. Host and profiler both time the host's side of instructions, so
the difference of the two tells what one clock is ahead of the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.profiler import record_function

from piper.launch.device.worker_group import ProfileKind, Report
from piper.runtime.streams.kernels import Kernel, kernels_of
from piper.runtime.streams.recording import range_name

_MARKS = 5
_NOBODY = 10**9
"""The number of no device."""


def profiled(run: Callable[[], Report], what: ProfileKind, where: torch.device) -> Report:
    """What ``run`` reports, with its kernels if they are asked for."""
    if what is not ProfileKind.KERNELS:
        return run()
    moments = []
    with kernels_of(where) as found:
        for i in range(_MARKS):
            moments.append(time.monotonic())
            with record_function(range_name(_NOBODY, i)):
                pass
        report = run()
    marks = {one.pc: one.start for one in found.ranges if one.device == _NOBODY}
    ahead = statistics.median(marks[i] - moment for i, moment in enumerate(moments))
    rows: dict[int, list[Kernel]] = {}
    for one in found.kernels:
        if one.device != _NOBODY:
            moved = one._replace(start=one.start - ahead, end=one.end - ahead)
            rows.setdefault(one.device, []).append(moved)
    return replace(report, kernels={device: tuple(row) for device, row in rows.items()})
