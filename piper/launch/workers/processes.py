"""One process per device, on this machine.

The workers get their own plans and programs, map the weights from one file, and get the optimizer
by value; they find each other through a file. All files are in a folder that only this user can
read, and no port is open to other machines. An error in one worker ends all of them; the caller
learns which device, which instruction and why.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from piper.base.errors import CapacityError, WorkerError
from piper.launch.device.device import Options
from piper.launch.device.worker_group import OneTrainer
from piper.launch.torch_flags import Flags
from piper.launch.workers.calls import Call, Failure, WorkerTask, dumped, receive
from piper.launch.workers.pickling import sendable
from piper.launch.workers.process_links import refuse_too_few_gpus
from piper.launch.workers.worker_process import WorkerProcess, spawned

_GRACE = 2.0
"""Seconds that workers get to exit by themselves."""
_LOOK = 1.0
"""Seconds between liveness checks. Usually a dead worker's connection closes at once; the checks
find dead workers whose connection another process holds open."""


class ProcessWorkerGroup(OneTrainer):
    """A process for each device of a program."""

    damaged = False  # a failed step ends the workers

    def __init__(
        self,
        *,
        timeout: float = 600.0,
        start_timeout: float = 120.0,
        threads: int | None = None,
        imports: Sequence[str] = (),
        share_gpus: bool = False,
        cuda_graphs: bool = False,
        shake: int | None = None,
    ) -> None:
        """``timeout`` is the seconds that one step may take, ``start_timeout`` the seconds until
        all workers must be ready. ``threads`` is the CPU threads of each worker, by default an even
        share. ``imports`` are modules that workers import first, because they define operations
        that the model uses (those made with ``torch.library.custom_op`` are found automatically).
        On GPUs, with ``share_gpus`` several workers may share one; with ``cuda_graphs`` steps are
        captured and replayed; ``shake`` is the seed of random stream delays, to find races."""
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._threads = threads
        self._imports = tuple(imports)
        self._share_gpus = share_gpus
        self._options = Options(cuda_graphs, shake)
        self._folder = tempfile.TemporaryDirectory(prefix="piper-")
        self._path = Path(self._folder.name)
        self._workers: list[WorkerProcess] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(self, _end, self._processes, self._folder)

    @property
    def devices(self) -> list[int]:
        return [worker.device for worker in self._workers]

    def seat(self, devices: Iterable[int], kind: torch.device) -> None:
        """Start workers for new devices, and end the others."""
        self._refuse_ended()
        wanted = sorted(devices)
        if kind.type == "cuda":
            refuse_too_few_gpus(len(wanted), share=self._share_gpus)
        self._retire([worker for worker in self._workers if worker.device not in wanted])
        used = {worker.local for worker in self._workers}
        free = (local for local in itertools.count() if local not in used)
        new = [device for device in wanted if device not in self.devices]
        workers = []
        for device, local in zip(new, free, strict=False):
            workers.append(spawned(device, local, self._path))
            self._processes.append(workers[-1].process)
        self._workers = sorted([*self._workers, *workers], key=lambda worker: worker.device)
        for worker in workers:
            task = WorkerTask(
                worker.device, worker.local, self._timeout, self._start_timeout,
                tuple(sys.path), self._imports, self._share_gpus, self._options,
            )  # fmt: skip
            worker.send(dumped(task))

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Send one call to all workers, and return their answers. Any interruption ends all
        workers: a call that only some received, or an unread answer, would be mistaken for another
        one later."""
        self._refuse_ended()
        threads = self._threads or max(1, (os.cpu_count() or 1) // len(self._workers))
        flags = Flags.here()
        ready = all(worker.answered for worker in self._workers)
        try:
            # one by one: the first worker can begin while the next one's part is cut
            for worker in self._workers:
                worker.forget_pc()
                given = tuple(sendable(x, worker.device, self._path) for x in arguments)
                worker.send(dumped(Call(method, given, flags, threads)))
            return self._answers(self._timeout if ready else self._start_timeout)
        except BaseException:
            self._end_workers(0.0)
            raise

    def _refuse_ended(self) -> None:
        if not self._finalizer.alive:
            raise WorkerError("the workers have ended after an error: launch the program again")

    def _retire(self, workers: Sequence[WorkerProcess]) -> None:
        """End some of the workers."""
        for worker in workers:
            worker.send(dumped(None))
        deadline = time.monotonic() + _GRACE
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
            worker.process.wait()
            worker.release()
            self._workers.remove(worker)

    def close(self, error: BaseException | None = None) -> None:
        """End all workers. Those that wait for a call exit by themselves, others are killed."""
        for worker in self._workers:
            worker.send(dumped(None))
        self._end_workers(_GRACE)

    def _end_workers(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._finalizer()  # kills the workers that are left, which unblocks their senders
        for worker in self._workers:
            worker.release()
        self._workers.clear()

    def _answers(self, timeout: float) -> list[Any]:
        """The answers of all workers; the first that fails or dies ends all."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._workers):
            waiting = [w for w in self._workers if w.device not in answers]
            left = deadline - time.monotonic()
            ready = wait([w.connection for w in waiting], timeout=min(_LOOK, max(0.0, left)))
            for worker in waiting:
                if worker.connection in ready:
                    answers[worker.device] = self._answer(worker)
                elif worker.process.poll() is not None and not worker.connection.poll():
                    self._fail_with_death(worker)
            if left <= 0:
                self._fail_with_silence(timeout, waiting)
        return [answers[worker.device] for worker in self._workers]

    def _answer(self, worker: WorkerProcess) -> Any:
        try:
            answer = receive(worker.connection)
        except (EOFError, OSError):
            self._fail_with_death(worker)
        if isinstance(answer, Failure):
            self._fail_with(worker, answer)
        worker.answered = True
        return answer

    def _fail_with(self, worker: WorkerProcess, failure: Failure) -> None:
        """Raise a worker's failure. A failed communication is most likely a consequence, so first
        look for its cause in the other workers."""
        deadline = time.monotonic() + _GRACE / 2
        while failure.consequence and time.monotonic() < deadline:
            for other in self._workers:
                if other.process.poll() not in (None, 0):
                    self._fail_with_death(other)
            for other in self._workers:
                message = _said(other.connection)
                if isinstance(message, Failure) and not message.consequence:
                    worker, failure = other, message
            time.sleep(0.02)
        cause: BaseException | None = None
        if failure.cause is not None:
            import cloudpickle

            with contextlib.suppress(Exception):
                cause = cloudpickle.loads(failure.cause)
        at = worker.at
        self._end_workers(0.0)
        text = (
            f"the worker of device {worker.device} failed{at}: {failure.summary}\n{failure.trace}"
        )
        if isinstance(cause, CapacityError):
            raise cause from WorkerError(text)
        raise WorkerError(text) from cause

    def _fail_with_death(self, worker: WorkerProcess) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_GRACE)
        text = f"the worker of device {worker.device} died{worker.at}: {worker.ended}"
        self._end_workers(0.0)
        raise WorkerError(text)

    def _fail_with_silence(self, timeout: float, workers: Sequence[WorkerProcess]) -> None:
        lines = [f"no answer within {timeout:g} s"]
        lines += [f"  from the worker of device {w.device}{w.at}" for w in workers]
        self._end_workers(0.0)
        raise WorkerError("\n".join(lines))


def _said(connection: Connection) -> Any:
    """The next message of a worker, if one has arrived."""
    with contextlib.suppress(EOFError, OSError):
        if connection.poll():
            return receive(connection)
    return None


def _end(
    processes: list[subprocess.Popen[bytes]], folder: tempfile.TemporaryDirectory[str]
) -> None:
    """Kill the processes that are left, and remove their shared folder."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
    processes.clear()
    folder.cleanup()
