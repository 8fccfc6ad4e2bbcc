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
from pathlib import Path
from typing import Any

import torch

from piper.base.errors import WorkerError
from piper.launch.device.worker_group import OneTrainer
from piper.launch.launch_options import WorkerOptions
from piper.launch.workers.calls import Call, WorkerTask, dumped
from piper.launch.workers.first_failure import answers_of
from piper.launch.workers.pickling import Pickled, sendable
from piper.launch.workers.process_links import refuse_too_few_gpus
from piper.launch.workers.worker_process import GRACE, WorkerProcess, spawned
from piper.runtime.torch_flags import Flags


class ProcessWorkerGroup(OneTrainer):
    """A process for each device of a program."""

    damaged = False  # a failed step ends the workers

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
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
            refuse_too_few_gpus(len(wanted), share=self._options.share_gpus)
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
            task = WorkerTask(worker.device, worker.local, tuple(sys.path), self._options)
            worker.send(dumped(task))

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Send one call to all workers, and return their answers. Any interruption ends all
        workers: a call that only some received, or an unread answer, would be mistaken for another
        one later."""
        self._refuse_ended()
        threads = self._options.threads or max(1, (os.cpu_count() or 1) // len(self._workers))
        flags = Flags.here()
        ready, pickled = all(worker.answered for worker in self._workers), Pickled()
        try:
            # one by one: the first worker can begin while the next one's part is cut
            for worker in self._workers:
                worker.forget_pc()
                given = tuple(sendable(x, worker.device, self._path, pickled) for x in arguments)
                worker.send(dumped(Call(method, given, flags, threads)))
            limit = self._options.timeout if ready else self._options.start_timeout
            return answers_of(self._workers, limit)
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
        deadline = time.monotonic() + GRACE
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
        self._end_workers(GRACE)

    def _end_workers(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._finalizer()  # kills the workers that are left, which unblocks their senders
        for worker in self._workers:
            worker.release()
        self._workers.clear()


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
