"""A thread that detects that a device is stuck or that another one has failed.

On a GPU the host neither waits for communications nor learns that they hang. A process that reads a
loss is then stuck in the driver, where no exception can reach it. The monitor reports what is known
and ends the process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

Query = Callable[[], bool]
"""Returns whether the watched work is done."""

_PERIOD = 0.2
"""Seconds between two checks."""


class Monitor:
    """Watches how long work takes."""

    def __init__(self, stuck: Callable[[float], str | None], fail: Callable[[str], None]) -> None:
        """Every round calls ``stuck`` with the seconds that the oldest watched work has taken so
        far. If it returns a problem, ``fail`` is called with it, and the monitor ends."""
        self._stuck = stuck
        self._fail = fail
        self._watched: deque[Query] = deque()
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="piper monitor", daemon=True)
        self._thread.start()

    def watch(self, over: Query) -> None:
        """Time work until ``over``, starting now or when the previously watched work ends."""
        if not self._watched:
            self._since = time.monotonic()
        self._watched.append(over)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD):
            while self._watched and self._watched[0]():
                self._since = time.monotonic()
                self._watched.popleft()
            taken = time.monotonic() - self._since if self._watched else 0.0
            problem = self._stuck(taken)
            if problem is not None and not self._stop.is_set():
                self._fail(problem)
                return
