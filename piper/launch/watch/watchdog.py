"""Ends a process whose GPU is stuck waiting for others, and reports local errors to the others."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from piper.ir.ops import Group
from piper.launch.device.loaded_device import LoadedDevice
from piper.launch.watch.heartbeat import Heartbeat
from piper.launch.watch.liveness import Monitor, Query
from piper.runtime.streams.signals import Signal

_ABORT = 10.0
"""Seconds that the communicators may take to abort."""


class Watchdog:
    """Watches one process of a GPU job. The watching never calls the driver: it may be blocked."""

    def __init__(self, store: dist.Store, members: Group, number: int, timeout: float) -> None:
        self._number = number
        self._heartbeat = Heartbeat(store, members, number, timeout)
        self._signal = Signal()
        self._monitor = Monitor(self._heartbeat.problem, end_process)

    def look_at(self, device: LoadedDevice) -> None:
        """Watch ``device``, the device of this process."""
        self._heartbeat.device = device

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Report an error raised inside to the other processes, which would wait for this one."""
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise

    @contextmanager
    def over(self) -> Iterator[None]:
        """Like ``telling``; also watch the GPU work submitted inside until the GPU finishes it."""
        handed = _Handed(self._signal)
        self._monitor.watch(handed.over)
        with self.telling():
            yield
        handed.record(self._heartbeat.device)

    def close(self) -> None:
        """Stop watching; there was no error."""
        self._monitor.close()

    @contextmanager
    def closing(self, error: BaseException) -> Iterator[None]:
        """Training ends with ``error``: end the process if the code inside takes too long."""
        self.tell(error)
        self._monitor.close()
        text = "".join(traceback.format_exception(error))
        last = threading.Timer(
            _ABORT, end_process, [f"its communicators did not end after:\n{text}"]
        )
        last.daemon = True
        last.start()
        try:
            yield
        finally:
            last.cancel()

    def tell(self, error: BaseException) -> None:
        """Report an error to the other processes."""
        self._heartbeat.tell(f"device {self._number} failed: {type(error).__name__}: {error}")


class _Handed:
    """GPU work that the host submits."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self._ends: tuple[int, Query | None] | None = None

    def record(self, device: LoadedDevice | None) -> None:
        """The host has submitted all of the work, including the last plan that ``device`` runs.
        The plan's reports may finish after everything else; work submitted later does not count."""
        end = self._signal.send(torch.cuda.current_stream())
        reports = None if device is None else device.running.bound.ended()
        self._ends = end, reports

    def over(self) -> bool:
        """Whether the GPU has finished the work."""
        if self._ends is None:
            return False
        end, reports = self._ends
        return self._signal.reached >= end and (reports is None or reports())


def end_process(problem: str) -> None:
    """End at once: the main thread may be stuck in the driver, where no exception reaches it."""
    sys.stderr.write(f"piper: {problem}\n")
    sys.stderr.flush()
    os._exit(1)
