"""Whether worker processes move, seen from outside, by ``/proc``.

A worker that computes uses CPU time, and one whose communication goes on comes to other
instructions. If no worker of a call does either, one of them hangs and the others wait for it. One
that a signal has stopped is known sooner.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from piper.launch.status.stopped import Stopped, stat_of
from piper.launch.workers.worker_process import WorkerProcess

_USER, _SYSTEM = 11, 12
"""The fields of ``/proc/PID/stat`` after the name that have the CPU time of a process."""


class Moves:
    """Watches some workers."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self._workers = workers
        self._stopped = Stopped()
        self._seen: object = None
        self._since = time.monotonic()

    def any_stopped(self) -> bool:
        """Whether a signal has stopped one, as far as the calls of this method saw."""
        return bool(self._stopped.among(worker.process.pid for worker in self._workers))

    def seconds_without(self) -> float:
        """For how long no worker has moved, as far as the calls of this method saw; 0 where the
        system does not tell."""
        if sys.platform != "linux":
            return 0.0
        now = time.monotonic()
        seen = [
            (worker.moves, *stat_of(worker.process.pid)[_USER : _SYSTEM + 1])
            for worker in self._workers
        ]
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since
