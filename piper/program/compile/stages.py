"""The stages of a compilation or a launch: shown while they take long, with their times at the end.

Nothing is shown in the first second, nor without a terminal unless the user asks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer


class Stages:
    """Measures stages one after another, and shows them if ``shown``: a status line on a terminal,
    plain lines elsewhere. The default is to show them on a terminal. Under torchrun only rank 0
    does."""

    def __init__(self, what: str, shown: bool | None, *, after: float = 1.0) -> None:
        """``after`` is the number of seconds before the first line."""
        self.seconds: dict[str, float] = {}
        """The seconds of each stage, in order."""
        self._what = what
        self._begun = time.perf_counter()
        self._after = after
        self._terminal = sys.stderr.isatty()
        first = os.environ.get("RANK", "0") == "0"
        self._shown = first and (self._terminal if shown is None else shown)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage; times of equal names add up."""
        begun = time.perf_counter()
        if self._shown and not self._terminal and begun - self._begun > self._after:
            sys.stderr.write(f"{self._what}: {name}\n")
        with self._showing(name):
            yield
        seconds = time.perf_counter() - begun
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def end(self) -> None:
        """Show the times of all stages, if they took more than a second together."""
        whole = time.perf_counter() - self._begun
        if self._shown and whole > self._after:
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
            sys.stderr.write(f"{self._what} took {whole:.1f} s: {parts}\n")

    @contextmanager
    def _showing(self, name: str) -> Iterator[None]:
        if not (self._shown and self._terminal):
            yield
            return
        from rich.console import Console  # imported late: most processes show nothing

        status = Console(stderr=True).status(f"{self._what}: {name}")
        timer = Timer(max(0.0, self._begun + self._after - time.perf_counter()), status.start)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            status.stop()
