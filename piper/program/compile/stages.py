"""The stages of a compilation or a launch: shown while they take long, with their times at the end.

Nothing is shown in the first second. Without a terminal, unless the user asks for all stages, long
work has one line after a few seconds and one at its end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Timer

SECONDS, LONG_SECONDS = 1.0, 5.0
"""The time before the first line, and that before the one line where nobody watches."""


class Stages:
    """Measures stages one after another, and shows them if ``shown``: on a terminal a line with the
    seconds of the stage, plain lines elsewhere. The default is to show them on a terminal, and
    elsewhere only that long work has begun and ended. Under torchrun only rank 0 shows them."""

    def __init__(self, what: str, shown: bool | None, *, after: float | None = None) -> None:
        """``after`` is the number of seconds before the first line."""
        self.seconds: dict[str, float] = {}
        """The seconds of each stage, in order."""
        self._what = what
        self._begun = time.perf_counter()
        self._terminal = sys.stderr.isatty()
        first = os.environ.get("RANK", "0") == "0"
        self._shown = first and shown is not False
        self._said = False
        self._once = shown is None and not self._terminal
        """Whether one line is enough."""
        self._after = after if after is not None else LONG_SECONDS if self._once else SECONDS

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage; times of equal names add up."""
        begun = time.perf_counter()
        with self._showing(name) if self._shown and not self._said else nullcontext():
            yield
        seconds = time.perf_counter() - begun
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def end(self) -> None:
        """Show the times of all stages, if they took long enough together."""
        whole = time.perf_counter() - self._begun
        if self._shown and whole > self._after:
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
            sys.stderr.write(f"{self._what} took {whole:.1f} s: {parts}\n")

    @contextmanager
    def _showing(self, name: str) -> Iterator[None]:
        show, hide = self._line(name) if self._terminal else (partial(self._write, name), _nothing)
        wait = self._begun + self._after - time.perf_counter()
        timer = Timer(wait, show)
        (timer.start if wait > 0 else show)()
        try:
            yield
        finally:
            if wait > 0:
                timer.cancel()
                timer.join()
            hide()

    def _line(self, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """What shows and hides the line of a stage that begins now."""
        from rich.console import Console  # imported late: most processes show nothing

        status = Console(stderr=True).status(_Running(f"{self._what}: {name}"))
        return status.start, status.stop

    def _write(self, name: str) -> None:
        sys.stderr.write(f"{self._what}: {name}\n")
        self._said = self._once


class _Running:
    """The text of a stage, with its seconds until now."""

    def __init__(self, text: str) -> None:
        self._text, self._begun = text, time.perf_counter()

    def __rich__(self) -> str:
        return f"{self._text}, {time.perf_counter() - self._begun:.0f} s"


def _nothing() -> None:
    pass
