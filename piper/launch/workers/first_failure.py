"""The answers of workers to a call. The first worker that fails, dies or is silent ends the wait,
with a failure that names its device, its instruction and the cause."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import cloudpickle

from piper.base.errors import CapacityError, PiperError, WorkerError
from piper.launch.messages.calls import Failure, receive
from piper.launch.status.stopped import is_stopped
from piper.launch.workers.moves import Moves
from piper.launch.workers.worker_process import GRACE, WorkerProcess

_LOOK = 1.0
"""Seconds between liveness checks. Usually a dead worker's connection closes at once; the checks
find dead workers whose connection another process holds open."""
_LOOK_AT_MOVES = 0.25
"""The same where workers that hang are replaced."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """Why a call has no answers, as plain data."""

    text: str
    cause: bytes | None = None
    """The worker's own error, if it can be pickled."""
    consequence: bool = False
    """Whether another worker most likely failed first."""
    outside: bool = False
    """Whether the cause is no part of the program."""

    def error(self) -> PiperError:
        """The error for the caller."""
        cause: BaseException | None = None
        if self.cause is not None:
            with contextlib.suppress(Exception):
                cause = cloudpickle.loads(self.cause)
        error = WorkerError(self.text)
        error.outside = self.outside
        if isinstance(cause, CapacityError):
            cause.__cause__ = error
            return cause
        error.__cause__ = cause
        return error


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """Answers are missing, and it is not known why."""

    quiet: float
    """Seconds in which no worker has moved; 0 if workers that hang are not replaced."""
    missing: str
    """The workers without an answer, and where they are."""


class CallAnswers:
    """The answers of the workers of one machine to one call, by device. After a failure the caller
    has to end all workers."""

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        timeout: float,
        stall: float = math.inf,
        *,
        alone: bool = True,
    ) -> None:
        """The call fails after ``timeout`` seconds, or if they are ``alone``, ``stall`` seconds in
        which no worker moves. Otherwise they may wait for those of other machines."""
        self._workers = list(workers)
        self._alone = alone
        self._moves = None if stall == math.inf else Moves(workers)
        self._stall = stall
        self._look = _LOOK if self._moves is None else _LOOK_AT_MOVES
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._known: dict[int, Any] = {}

    def within(self, seconds: float) -> dict[int, Any] | FailedCall | StillWaiting:
        """All answers, unless they take longer than ``seconds``."""
        end = time.monotonic() + seconds
        while waiting := [w for w in self._workers if w.device not in self._known]:
            now = time.monotonic()
            left = max(0.0, min(self._look, end - now, self._deadline - now))
            ready = wait([w.connection for w in waiting], timeout=left)
            for worker in waiting:
                if worker.connection in ready:
                    if (failure := self._receive(worker)) is not None:
                        return failure
                elif not (ready or worker.process.poll() is None or worker.connection.poll()):
                    return _death(worker)
            if self._deadline <= now:
                return late(f"no answer within {self._timeout:g} s", _missing(waiting))
            quiet = 0.0
            if self._moves is not None:
                if self._moves.any_stopped():
                    return FailedCall(f"a worker does not go on\n{_missing(waiting)}", outside=True)
                quiet = self._moves.seconds_without()
                if self._alone and quiet > self._stall:
                    return late(f"no worker has moved for {self._stall:g} s", _missing(waiting))
            if end <= now:
                return StillWaiting(quiet, _missing(waiting))
        return self._known

    def idle(self, workers: Sequence[WorkerProcess], seconds: float) -> list[WorkerProcess]:
        """After a failure, those of ``workers`` that answer, or fail in turn, within ``seconds``:
        they can take another call."""
        end = time.monotonic() + seconds
        there = [worker for worker in workers if worker.process.poll() is None]
        while waiting := [w for w in there if w.device not in self._known]:
            left = max(0.0, end - time.monotonic())
            if not (ready := wait([worker.connection for worker in waiting], timeout=left)):
                break
            for worker in waiting:
                if worker.connection in ready:
                    try:
                        self._known[worker.device] = receive(worker.connection)
                    except (EOFError, OSError):
                        there.remove(worker)
        return [worker for worker in there if worker.device in self._known]

    def _receive(self, worker: WorkerProcess) -> FailedCall | None:
        try:
            answer = self._known[worker.device] = receive(worker.connection)
        except (EOFError, OSError):
            return _death(worker)
        if isinstance(answer, Failure):
            return self._failure(worker, answer)
        worker.answered = True
        return None

    def _failure(self, worker: WorkerProcess, failure: Failure) -> FailedCall:
        """The failure of a worker. A failed communication is most likely a consequence, so first
        look for its cause in the other workers."""
        deadline = time.monotonic() + GRACE / 2
        while failure.consequence and time.monotonic() < deadline:
            for other in self._workers:
                if other.process.poll() not in (None, 0):
                    return _death(other)
            for other in self._workers:
                if other.device not in self._known:
                    message = self._answer_now(other)
                    if isinstance(message, Failure) and not message.consequence:
                        worker, failure = other, message
            time.sleep(0.02)
        text = f"the worker of device {worker.device} failed{worker.at}: {failure.summary}\n"
        return FailedCall(text + failure.trace, failure.cause, failure.consequence)

    def _answer_now(self, worker: WorkerProcess) -> Any:
        """The answer of a worker, if it has arrived."""
        with contextlib.suppress(EOFError, OSError):
            if worker.connection.poll():
                self._known[worker.device] = receive(worker.connection)
        return self._known.get(worker.device)


def late(what: str, missing: str) -> FailedCall:
    """The failure of a call whose answers are missing."""
    return FailedCall(f"{what}\n{missing}", consequence=True)


def _missing(waiting: Iterable[WorkerProcess]) -> str:
    lines = []
    for worker in waiting:
        stopped = ", which a signal has stopped" if is_stopped(worker.process.pid) else ""
        lines.append(f"  from the worker of device {worker.device}{worker.at}{stopped}")
    return "\n".join(lines)


def _death(worker: WorkerProcess) -> FailedCall:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(GRACE)
    text = f"the worker of device {worker.device} died{worker.at}: {worker.ended}"
    return FailedCall(text, outside=worker.process.returncode == -signal.SIGKILL)
