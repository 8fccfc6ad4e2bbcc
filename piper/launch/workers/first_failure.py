"""The answers of workers to a call. The first worker that fails, dies or is silent ends the wait,
with an error that names its device, its instruction and the cause."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from piper.base.errors import CapacityError, PiperError, WorkerError
from piper.launch.workers.calls import Failure, receive
from piper.launch.workers.worker_process import GRACE, WorkerProcess

_LOOK = 1.0
"""Seconds between liveness checks. Usually a dead worker's connection closes at once; the checks
find dead workers whose connection another process holds open."""


def answers_of(workers: Sequence[WorkerProcess], timeout: float) -> list[Any]:
    """The answers of all workers. If one gives none, the caller has to end them."""
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(workers):
        waiting = [w for w in workers if w.device not in answers]
        left = deadline - time.monotonic()
        ready = wait([w.connection for w in waiting], timeout=min(_LOOK, max(0.0, left)))
        for worker in waiting:
            if worker.connection in ready:
                answers[worker.device] = _answer(worker, workers)
            elif worker.process.poll() is not None and not worker.connection.poll():
                raise _death(worker)
        if left <= 0:
            lines = [f"no answer within {timeout:g} s"]
            lines += [f"  from the worker of device {w.device}{w.at}" for w in waiting]
            raise WorkerError("\n".join(lines))
    return [answers[worker.device] for worker in workers]


def _answer(worker: WorkerProcess, workers: Sequence[WorkerProcess]) -> Any:
    try:
        answer = receive(worker.connection)
    except (EOFError, OSError):
        raise _death(worker) from None
    if isinstance(answer, Failure):
        raise _failure(worker, answer, workers)
    worker.answered = True
    return answer


def _failure(
    worker: WorkerProcess, failure: Failure, workers: Sequence[WorkerProcess]
) -> PiperError:
    """The error of a worker. A failed communication is most likely a consequence, so first look for
    its cause in the other workers."""
    deadline = time.monotonic() + GRACE / 2
    while failure.consequence and time.monotonic() < deadline:
        for other in workers:
            if other.process.poll() not in (None, 0):
                return _death(other)
        for other in workers:
            message = _said(other.connection)
            if isinstance(message, Failure) and not message.consequence:
                worker, failure = other, message
        time.sleep(0.02)
    cause: BaseException | None = None
    if failure.cause is not None:
        import cloudpickle

        with contextlib.suppress(Exception):
            cause = cloudpickle.loads(failure.cause)
    error = WorkerError(
        f"the worker of device {worker.device} failed{worker.at}: {failure.summary}\n"
        f"{failure.trace}"
    )
    if isinstance(cause, CapacityError):
        cause.__cause__ = error
        return cause
    error.__cause__ = cause
    return error


def _death(worker: WorkerProcess) -> WorkerError:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(GRACE)
    return WorkerError(f"the worker of device {worker.device} died{worker.at}: {worker.ended}")


def _said(connection: Connection) -> Any:
    """The next message of a worker, if one has arrived."""
    with contextlib.suppress(EOFError, OSError):
        if connection.poll():
            return receive(connection)
    return None
