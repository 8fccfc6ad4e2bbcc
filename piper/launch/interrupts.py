"""A step happens or does not: an interrupt (Ctrl-C) waits for its end, a second one does not."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NOTE = "piper: interrupted, as soon as this is done; once more to end at once\n"


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, the first SIGINT is noted, and whoever handles it outside is told at the end; of a
    second one it is told at once. Only the main thread can do that, and only with a handler of
    Python's; elsewhere nothing changes."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    noted: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            noted.clear()
            signal.signal(signal.SIGINT, usual)
            usual(number, frame)
        else:
            noted.append(frame)
            sys.stderr.write(_NOTE)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, usual)
        if noted:
            usual(signal.SIGINT, noted.pop())
