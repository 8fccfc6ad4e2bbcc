"""A worker process as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

KEEPING = {
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MIMALLOC_PURGE_DELAY": "50",
}
"""Settings of torch's CPU allocator: it keeps memory that a step frees and allocates again. glibc
keeps allocations below 32 MiB, its largest threshold; mimalloc (as on 64-bit ARM) keeps all of them
for 50 ms."""
_NOWHERE = (-1).to_bytes(8, sys.byteorder, signed=True)
"""The program counter of a worker that runs no instruction."""


@dataclass(slots=True)
class WorkerProcess:
    """The parent's handle on one worker process."""

    device: int
    local: int
    """Its index on this machine, which is also the index of its GPU."""
    process: subprocess.Popen[bytes]
    connection: Connection
    counter: Path
    """The file in which it keeps its program counter."""
    sender: threading.Thread | None = None

    def send(self, message: bytes) -> None:
        """Send in a thread: a worker that does not read must not block the caller. A dead worker is
        detected while waiting for its answer."""
        self.sender = threading.Thread(target=_send, args=(self.connection, message), daemon=True)
        self.sender.start()

    def release(self) -> None:
        """Release the resources of a worker that has ended."""
        if self.sender is not None:
            self.sender.join()  # the worker has ended, so this does not block
        self.connection.close()

    @property
    def pc(self) -> int | None:
        """The program counter: the instruction that it runs, or ran last."""
        pc = int.from_bytes(self.counter.read_bytes(), sys.byteorder, signed=True)
        return None if pc < 0 else pc

    def forget_pc(self) -> None:
        """Reset the program counter: no instruction runs yet."""
        with self.counter.open("r+b") as file:
            file.write(_NOWHERE)

    @property
    def ended(self) -> str:
        """How the process ended."""
        code = self.process.returncode
        if code is None:
            return "it closed its connection"
        if code < 0:
            known = {s.value: s.name for s in signal.Signals}
            return f"killed by {known.get(-code, f'signal {-code}')}"
        return f"exit code {code}"


def spawned(device: int, local: int, folder: Path) -> WorkerProcess:
    """Start a worker; it reads its files from ``folder``."""
    counter = folder / f"at.{device}"
    counter.write_bytes(_NOWHERE)
    environment = dict(os.environ)
    if sys.platform == "linux":
        for name, value in KEEPING.items():
            environment.setdefault(name, value)
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    here, there = Pipe()
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", "piper.launch.workers.worker", str(there.fileno()), str(folder)],
            stdin=subprocess.PIPE,
            env=environment,
            pass_fds=[there.fileno()],
            start_new_session=True,  # only the caller receives Ctrl-C
        )
    return WorkerProcess(device, local, process, here, counter)


def _send(connection: Connection, message: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(message)
