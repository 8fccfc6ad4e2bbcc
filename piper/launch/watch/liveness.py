"""Notices, from a thread of its own, that a device does not go on, or that another one has failed.

On a GPU the host neither waits for communications nor learns that they hang: a process that reads a
loss is stuck in the driver then, and no exception can reach it. The monitor says what is known and
ends the process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

Query = Callable[[], bool]
"""Whether something is over."""

_PERIOD = 0.2
"""Seconds between two looks."""


class Monitor:
    """Watches how long things take."""

    def __init__(self, stuck: Callable[[float], str | None], fail: Callable[[str], None]) -> None:
        """In every round ``stuck`` is asked whether something is wrong, and told the seconds that
        what is watched has taken so far; ``fail`` is given what it says, if that is not None."""
        self._stuck = stuck
        self._fail = fail
        self._watched: deque[Query] = deque()
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="piper monitor", daemon=True)
        self._thread.start()

    def watch(self, over: Query) -> None:
        """Count the seconds until ``over``, from now or from the end of what is watched before."""
        if not self._watched:
            self._since = time.monotonic()
        self._watched.append(over)

    def close(self) -> None:
        """Watch nothing any more."""
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
