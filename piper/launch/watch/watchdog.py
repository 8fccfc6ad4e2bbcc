"""Ends a process whose GPU waits for others in vain, and tells the others what went wrong here."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from piper.launch.device.device import LoadedDevice
from piper.launch.watch.heartbeat import Neighbours
from piper.launch.watch.liveness import Monitor, Query
from piper.program.program import Program
from piper.runtime.streams.signals import Signal

_ABORT = 10.0
"""Seconds that the communicators may take to give up."""


class Guard:
    """Watches one process of a job on GPUs, without a call to the driver, which may be blocked."""

    def __init__(self, store: dist.Store, program: Program, number: int, timeout: float) -> None:
        self._number = number
        self._neighbours = Neighbours(store, program, number, timeout)
        self._signal = Signal()
        self._monitor = Monitor(self._neighbours.problem, _end_process)

    def look_at(self, device: LoadedDevice) -> None:
        """``device`` is this process's."""
        self._neighbours.device = device

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error within is told to the others, who would wait for this process."""
        try:
            yield
        except BaseException as error:
            self._tell(error)
            raise

    @contextmanager
    def over(self) -> Iterator[None]:
        """The same, and what is handed to the GPU within is watched until the GPU has come to its
        end."""
        handed = _Handed(self._signal)
        self._monitor.watch(handed.over)
        with self.telling():
            yield
        handed.record(self._neighbours.device)

    def close(self) -> None:
        """All is well."""
        self._monitor.close()

    @contextmanager
    def closing(self, error: BaseException) -> Iterator[None]:
        """Training ends with ``error``: the process is ended if what is done within takes long."""
        self._tell(error)
        self._monitor.close()
        text = "".join(traceback.format_exception(error))
        last = threading.Timer(
            _ABORT, _end_process, [f"its communicators did not end after:\n{text}"]
        )
        last.daemon = True
        last.start()
        try:
            yield
        finally:
            last.cancel()

    def _tell(self, error: BaseException) -> None:
        self._neighbours.tell(f"device {self._number} failed: {type(error).__name__}: {error}")


class _Handed:
    """What the host hands to the GPU."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self._ends: tuple[int, Query | None] | None = None

    def record(self, device: LoadedDevice | None) -> None:
        """The host has handed over all of it, the last plan that ``device`` runs included. Its
        reports may come after all else; what is handed over later does not count."""
        end = self._signal.send(torch.cuda.current_stream())
        reports = None if device is None else device.running.bound.ended()
        self._ends = end, reports

    def over(self) -> bool:
        """Whether the GPU has come to its end."""
        if self._ends is None:
            return False
        end, reports = self._ends
        return self._signal.reached >= end and (reports is None or reports())


def _end_process(problem: str) -> None:
    """The main thread may be stuck in the driver, where no exception reaches it."""
    sys.stderr.write(f"piper: {problem}\n")
    sys.stderr.flush()
    os._exit(1)
