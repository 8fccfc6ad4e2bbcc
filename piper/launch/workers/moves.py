"""Whether worker processes move, seen from outside, by ``/proc``.

A worker that computes uses CPU time, and one whose communication goes on comes to other
instructions. If no worker of a call does either, one of them hangs and the others wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from piper.launch.workers.worker_process import WorkerProcess

_STATE, _USER, _SYSTEM = 0, 11, 12
"""Fields of ``/proc/PID/stat`` after the name of the process: its state, and its CPU time."""


class Moves:
    """Watches some workers."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self._workers = workers
        self._seen: object = None
        self._since = time.monotonic()

    def seconds_without(self) -> float:
        """For how long no worker has moved, as far as the calls of this method saw; 0 where the
        system does not tell."""
        now = time.monotonic()
        try:
            seen = [
                (worker.counter.read_bytes(), *_fields(worker)[_USER : _SYSTEM + 1])
                for worker in self._workers
            ]
        except OSError:
            return 0.0
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


def is_stopped(worker: WorkerProcess) -> bool:
    """Whether a signal has stopped the process."""
    try:
        return _fields(worker)[_STATE] in ("T", "t")
    except OSError:
        return False


def _fields(worker: WorkerProcess) -> list[str]:
    stat = Path(f"/proc/{worker.process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()
