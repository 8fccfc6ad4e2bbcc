"""What the ranks of torchrun on one machine do for each other, and when torchrun is gone.

torchrun restarts all ranks when one of them ends. The others would wait for one that a signal has
stopped, so they end it, if torchrun may restart (``--max-restarts``). If torchrun itself is gone,
they end: a new one may start them again, and would find them at their checkpoints.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from piper.launch.status.stopped import Stopped
from piper.launch.watch.liveness import Monitor
from piper.launch.watch.watchdog import end_process
from piper.program.compile.rank_zero import refuse_orphan


def watched_ranks() -> Callable[[], None] | None:
    """Begin to watch torchrun and the ranks of this machine. Returns a function that ends the
    watching; None if torchrun has not started this process. Refused if it has ended already."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    refuse_orphan()
    agent, seen = os.getppid(), Stopped()
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"

    def look(seconds: float) -> str | None:
        if os.getppid() != agent:
            return "torchrun has ended, so this rank ends, too"
        for pid in seen.among(_ranks(agent)) if may_restart else ():
            sys.stderr.write(f"piper: ended the rank of process {pid}: a signal had stopped it\n")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return None

    return Monitor(look, end_process).close


def _ranks(agent: int) -> list[int]:
    """The processes that torchrun started on this machine."""
    with suppress(OSError):
        return [*map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())]
    return []
