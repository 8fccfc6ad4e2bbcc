"""Workers that a signal has stopped: they never end and never go on by themselves.

torchrun restarts all ranks when one of them ends. The others would wait for one that is stopped, so
those on its machine end it. Only where torchrun may restart (``--max-restarts``).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from piper.launch.watch.liveness import Monitor

_LONG = 1.0
"""Seconds after which a stopped process counts: whoever stops a whole job continues it part by
part."""


class Stopped:
    """Notes since when processes are stopped."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def among(self, pids: Iterable[int]) -> list[int]:
        """Those of ``pids`` that every call has seen stopped, for at least a second."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in pids if is_stopped(pid)}
        return [pid for pid, since in self._since.items() if now - since >= _LONG]


def watched_ranks() -> Callable[[], None] | None:
    """Begin to end stopped ranks of this machine. Returns a function that ends the watching; None
    if torchrun would not restart them."""
    if not int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        return None
    seen = Stopped()

    def look(seconds: float) -> None:
        for pid in seen.among(_ranks()):
            sys.stderr.write(f"piper: ended the rank of process {pid}: a signal had stopped it\n")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    return Monitor(look, print).close


def _ranks() -> list[int]:
    """The processes that torchrun started on this machine."""
    agent = os.getppid()
    with suppress(OSError):
        return [*map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())]
    return []


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process. The state of one in a debugger is "t"."""
    return stat_of(pid)[:1] == ["T"]


def stat_of(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name; none if the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
