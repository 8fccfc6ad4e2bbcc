"""A step happens or does not: an interrupt (Ctrl-C) waits for its end, a second one does not."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NOTE = "piper: interrupted, as soon as this is done; once more to end at once\n"


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, the first SIGINT is noted, and whoever handles it outside is told at the end; of a
    second one it is told at once. Only the main thread can do that, and only with a handler of
    Python's; elsewhere, and inside another one, nothing changes."""
    usual = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()
    if not here or not callable(usual) or isinstance(usual, _Noting):
        yield
        return
    noting = _Noting(usual)
    signal.signal(signal.SIGINT, noting)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is noting:
            signal.signal(signal.SIGINT, usual)
        if noting.noted:
            usual(signal.SIGINT, noting.noted.pop())


class _Noting:
    """Notes the first SIGINT, and gives a second one to the usual handler."""

    def __init__(self, usual: Callable[[int, FrameType | None], Any]) -> None:
        self._usual = usual
        self.noted: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            self.noted.clear()
            signal.signal(signal.SIGINT, self._usual)
            self._usual(number, frame)
        else:
            self.noted.append(frame)
            sys.stderr.write(_NOTE)
