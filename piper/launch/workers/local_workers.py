"""The worker processes of one machine: how they start, get calls and end.

They share a folder that only this user can read. Nothing is left of them when they end, when the
process that started them is killed, or when this object is garbage-collected.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from piper.base.errors import WorkerError
from piper.launch.launchers import WorkerOptions
from piper.launch.messages.calls import StoreAddress, WorkerTask, dumped
from piper.launch.status.stopped import is_stopped
from piper.launch.watch.watchdog import ABORT
from piper.launch.workers.first_failure import CallAnswers
from piper.launch.workers.fork_server import ForkServer
from piper.launch.workers.process_links import refuse_too_few_gpus
from piper.launch.workers.worker_process import GRACE, WorkerProcess, forked


class LocalWorkers:
    """A worker process for each of some devices."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="piper-")
        self.folder = Path(self._folder.name)
        self.processes: list[WorkerProcess] = []
        self._server = ForkServer(self.folder)
        self._kind = "cpu"
        self._finalizer = weakref.finalize(self, _end, self._server, self._folder)

    @property
    def ready(self) -> bool:
        """Whether all have answered a call."""
        return all(worker.answered for worker in self.processes)

    @property
    def devices(self) -> list[int]:
        return [worker.device for worker in self.processes]

    def seat(
        self, devices: Iterable[int], kind: torch.device, store: StoreAddress | None = None
    ) -> list[int]:
        """Start workers for new devices, and end the others. They find each other in ``store``, or
        without one in a file of the folder. Returns the new devices."""
        refuse_ended(self._finalizer)
        wanted = sorted(devices)
        self._kind = kind.type
        if kind.type == "cuda":
            refuse_too_few_gpus(len(wanted), share=self._options.share_gpus)
        self._retire([worker for worker in self.processes if worker.device not in wanted])
        used = {worker.local for worker in self.processes}
        free = (local for local in itertools.count() if local not in used)
        new = [device for device in wanted if device not in self.devices]
        workers = []
        for device, local in zip(new, free, strict=False):
            workers.append(forked(device, local, self.folder, self._server))
        self.processes = sorted([*self.processes, *workers], key=lambda worker: worker.device)
        for worker in workers:
            task = WorkerTask(worker.device, worker.local, tuple(sys.path), store, self._options)
            worker.send(dumped(task))
        return new

    def rename(self, devices: Mapping[int, int]) -> None:
        """Workers of these devices become those of others, which have none."""
        for worker in self.processes:
            worker.device = devices.get(worker.device, worker.device)
        self.processes.sort(key=lambda worker: worker.device)

    def call(self, calls: Iterable[tuple[int, bytes]], *, alone: bool = True) -> CallAnswers:
        """Send each worker its message, as soon as this is there. The answers must be waited for.
        ``alone`` says that no other machine has workers."""
        refuse_ended(self._finalizer)
        for device, message in calls:
            worker = self.processes[self.devices.index(device)]
            worker.call(message)
        options = self._options
        if not self.ready:
            return CallAnswers(self.processes, options.start_timeout)
        stall = options.stall if options.restarts else math.inf
        return CallAnswers(self.processes, options.timeout, stall, alone=alone)

    def keep_idle(self, answers: CallAnswers) -> None:
        """After a failed call, keep the workers that can take another one, and end the others. The
        stopped ones are ended first: those that wait for them fail then."""
        self._remove([worker for worker in self.processes if is_stopped(worker.process.pid)])
        for worker in self.processes:
            worker.give_up()
        idle = answers.idle(self.processes, ABORT if self._kind == "cuda" else GRACE)
        self._remove([worker for worker in self.processes if worker not in idle])

    def _retire(self, workers: Sequence[WorkerProcess]) -> None:
        """End some of the workers."""
        for worker in workers:
            worker.send(dumped(None))
        deadline = time.monotonic() + GRACE
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._remove(workers)

    def _remove(self, workers: Sequence[WorkerProcess]) -> None:
        """Kill some of the workers."""
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.wait()
            worker.release()
            self.processes.remove(worker)

    def close(self) -> None:
        """End all workers. Those that wait for a call exit by themselves, others are killed."""
        for worker in self.processes:
            worker.send(dumped(None))
        self.end(GRACE)

    def end(self, grace: float = 0.0) -> None:
        """Kill the workers that do not exit within ``grace`` seconds."""
        deadline = time.monotonic() + grace
        for worker in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._finalizer()  # kills the workers that are left, which unblocks their senders
        for worker in self.processes:
            worker.release()
        self.processes.clear()


def refuse_ended(finalizer: weakref.finalize[..., Any]) -> None:
    """Refuse a call to workers that ``finalizer`` has ended."""
    if not finalizer.alive:
        raise WorkerError("the workers have ended after an error: launch the program again")


def _end(server: ForkServer, folder: tempfile.TemporaryDirectory[str]) -> None:
    """Kill the processes that are left, and remove their shared folder."""
    server.close()
    folder.cleanup()
