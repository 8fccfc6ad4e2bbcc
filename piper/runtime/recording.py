"""When each instruction of a plan began and ended, measured while it runs.

A computation is timed where it is called. A communication lasts from the moment at which its stream
takes it up until it is over; messages between two tell nobody when they arrive, and end when the
device has waited for them, which for those it sends is at the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from piper.runtime.pending import Act, Pending


class Measured(NamedTuple):
    """One instruction: its place in the plan, and seconds on a clock that the processes of one
    machine share."""

    place: int
    start: float
    end: float


class Recorder:
    """What one device's instructions took, since it was last asked."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._found: list[Measured] = []

    def wrapped(self, act: Act, place: int) -> Act:
        """``act``, timed."""
        now, found = self._now, self._found

        def timed() -> Pending | None:
            start = now()
            begun = act()
            if begun is None:
                found.append(Measured(place, start, now()))
                return None

            def over() -> None:
                first, last = begun.span or (start, now())
                found.append(Measured(place, first, last))

            return begun.then(over)

        return timed

    def take(self) -> tuple[Measured, ...]:
        """All that was measured, in the order of the plan."""
        found = tuple(sorted(self._found))
        self._found.clear()
        return found
