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

ABORT = 10.0
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
        ends: list[Query] = []
        self._monitor.watch(lambda: bool(ends) and all(over() for over in ends))
        with self.telling():
            yield
        ends += self._submitted()

    def _submitted(self) -> list[Query]:
        """Functions that tell whether the GPU has finished the work submitted so far, and the
        reports of the last plan, which may finish after everything else."""
        end, device = self._signal.send(torch.cuda.current_stream()), self._heartbeat.device
        reports = [] if device is None else [device.running.bound.ended()]
        return [lambda: self._signal.reached >= end, *reports]

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
            ABORT, end_process, [f"its communicators did not end after:\n{text}"]
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


def end_process(problem: str) -> None:
    """End at once: the main thread may be stuck in the driver, where no exception reaches it."""
    sys.stderr.write(f"piper: {problem}\n")
    sys.stderr.flush()
    os._exit(1)
