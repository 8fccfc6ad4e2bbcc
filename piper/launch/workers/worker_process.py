"""A worker process as its parent sees it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from piper.launch.status.seen import HEADER, Number, seen_in
from piper.launch.workers.fork_server import ForkedProcess, ForkServer

GRACE = 2.0
"""Seconds that a process gets to exit by itself."""


@dataclass(slots=True)
class WorkerProcess:
    """The parent's handle on one worker process."""

    device: int
    local: int
    """Its index on this machine, which is also the index of its GPU."""
    process: ForkedProcess
    connection: Connection
    counter: Path
    """The file in which it publishes its program counter (``Published``)."""
    calls: int = 0
    """The number of calls that it was sent."""
    answered: bool = False
    """Whether it has answered a call: until then it starts."""
    sender: threading.Thread | None = None

    def send(self, message: bytes) -> None:
        """Send in a thread, after earlier messages: a worker that does not read must not block the
        caller. A dead worker is detected while waiting for its answer."""
        given = self.connection, message, self.sender
        self.sender = threading.Thread(target=_send, args=given, daemon=True)
        self.sender.start()

    def call(self, message: bytes) -> None:
        """Send it a call."""
        self.calls += 1
        self.send(message)

    def give_up(self) -> None:
        """Tell it that the call under way has failed elsewhere. On a CPU it learns this from its
        connections; on a GPU it would wait."""
        with self.counter.open("r+b") as file:
            file.seek(Number.GIVEN_UP * 8)
            file.write(self.calls.to_bytes(8, sys.byteorder))

    def release(self) -> None:
        """Release the resources of a worker that has ended."""
        if self.sender is not None:
            self.sender.join()  # the worker has ended, so this does not block
        self.connection.close()

    @property
    def at(self) -> str:
        """The instruction that it runs or ran last, as text for errors."""
        if not self.answered:
            return " before it was ready"
        seen = seen_in(self.counter.read_bytes())
        if seen is None or seen.at is None:
            return ""
        return f" at instruction {seen.pc} ({seen.at.name})"

    @property
    def moves(self) -> bytes:
        """Numbers that change when it comes to another instruction."""
        with self.counter.open("rb") as file:
            return file.read(HEADER.size)

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


def forked(device: int, local: int, folder: Path, server: ForkServer) -> WorkerProcess:
    """Start a worker; it shares files with its parent in ``folder``."""
    counter = folder / f"at.{local}"
    counter.touch()
    here, there = Pipe()
    with there:
        process = server.fork(there.fileno())
    return WorkerProcess(device, local, process, here, counter)


def _send(connection: Connection, message: bytes, earlier: threading.Thread | None) -> None:
    if earlier is not None:
        earlier.join()
    with contextlib.suppress(OSError):
        connection.send_bytes(message)
