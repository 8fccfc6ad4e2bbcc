"""One process per device, on this machine.

The workers get their own plans and programs, map the weights from one file, and get the optimizer
by value; they find each other through a file. All files are in a folder that only this user can
read, and no port is open to other machines. After an error in one worker the caller learns which
device, which instruction and why; all workers end, or with ``restarts`` those that cannot take
another call.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from piper.base.errors import WorkerError
from piper.launch.device.worker_group import OneTrainer
from piper.launch.launch_options import WorkerOptions
from piper.launch.messages.calls import Call, dumped
from piper.launch.messages.pickling import Pickled, sendable
from piper.launch.workers.first_failure import FailedCall
from piper.launch.workers.local_workers import LocalWorkers
from piper.runtime.torch_flags import Flags


class ProcessWorkerGroup(OneTrainer):
    """A process for each device of a program."""

    damaged = False  # a failed step ends the workers

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.workers = LocalWorkers(options)

    @property
    def devices(self) -> list[int]:
        return self.workers.devices

    def seat(self, devices: Iterable[int], kind: torch.device) -> None:
        self.workers.seat(devices, kind)

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Send one call to all workers, and return their answers. Any interruption ends all
        workers: a call that only some received, or an unread answer, would be mistaken for another
        one later."""
        workers, options = self.workers, self.options
        threads = options.threads or max(1, (os.cpu_count() or 1) // max(1, len(self.devices)))
        flags, pickled = Flags.here(), Pickled()
        weights = workers.folder / "weights.pt"

        def message(device: int) -> bytes:
            given = tuple(sendable(x, device, weights, pickled) for x in arguments)
            return dumped(Call(method, given, flags, threads))

        try:
            # one by one: the first worker can begin while the next one's part is cut
            calls = ((device, message(device)) for device in self.devices)
            limit = options.timeout if workers.ready else options.start_timeout
            given = workers.call(calls, limit)
            answers = given.within(math.inf)
        except BaseException:
            workers.end()
            raise
        if isinstance(answers, FailedCall):
            error = answers.error()
            if options.restarts and isinstance(error, WorkerError):
                workers.keep_idle(given)
            else:
                workers.end()
            raise error
        assert answers is not None
        return [answers[device] for device in self.devices]

    def close(self, error: BaseException | None = None) -> None:
        self.workers.close()
