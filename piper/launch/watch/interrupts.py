"""Steps are atomic: a first interrupt (Ctrl-C) waits for the end of the step, a second does not."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NOTE = "piper: stopping after the current operation; press Ctrl-C again to stop at once\n"


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, the first SIGINT is held back until the end and then passed to the previous handler;
    a second SIGINT acts at once. This needs the main thread and a Python handler; without them, or
    when nested, nothing changes."""
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
    """Records the first SIGINT and passes a second one to the usual handler."""

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
