"""A measured step in one process, under torch's profiler if kernels are requested.

The profiler has its own clock. Host and profiler both time a few empty ranges before the step; the
median difference is the offset between the clocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.profiler import record_function

from piper.ir.grouped import grouped
from piper.launch.device.report import ProfileKind, Report, earlier
from piper.runtime.streams.kernels import with_kernels
from piper.runtime.streams.recording import range_name

_MARKS = 5
"""Empty ranges that both clocks time."""
_NOBODY = 10**9
"""A device number that no device has; it labels the empty ranges."""


def profiled(run: Callable[[], Report], what: ProfileKind, where: torch.device) -> Report:
    """The report of ``run``, with its kernels if requested."""
    if what is not ProfileKind.KERNELS:
        return run()
    moments = []

    def marked() -> Report:
        for i in range(_MARKS):
            moments.append(time.monotonic())
            with record_function(range_name(_NOBODY, i)):
                pass
        return run()

    report, ranges, kernels = with_kernels(marked, where)
    marks = {mark.pc: mark.start for mark in ranges if mark.device == _NOBODY}
    ahead = statistics.median(marks[i] - moment for i, moment in enumerate(moments))
    rows = grouped((kernel.device, kernel) for kernel in kernels)
    rows.pop(_NOBODY, None)
    return replace(report, kernels=earlier(rows, ahead))
