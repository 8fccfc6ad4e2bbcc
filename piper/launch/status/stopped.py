"""Workers that a signal has stopped: they never end and never go on by themselves."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LONG = 1.0
"""Seconds after which a stopped process counts. The processes of a job that is stopped and
continued as a whole go on one after another."""


class Stopped:
    """Notes since when processes are stopped."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def among(self, pids: Iterable[int]) -> list[int]:
        """Those of ``pids`` that every call has seen stopped, for at least a second."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in pids if is_stopped(pid)}
        return [pid for pid, since in self._since.items() if now - since >= _LONG]


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process. The state of one in a debugger is "t"."""
    return stat_of(pid)[:1] == ["T"]


def stat_of(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name; none if the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
