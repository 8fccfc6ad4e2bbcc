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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from piper.launch.device.weight_readers import FirstWeights
from piper.launch.launchers import WorkerOptions
from piper.launch.messages.calling_group import CallingGroup, DeviceAnswers
from piper.launch.workers.first_failure import CallAnswers, StillWaiting
from piper.launch.workers.local_workers import LocalWorkers


class ProcessWorkerGroup(CallingGroup):
    """A process for each device of a program."""

    def __init__(self, options: WorkerOptions) -> None:
        super().__init__(options)
        self.workers = LocalWorkers(options)
        self._last: CallAnswers | None = None

    @property
    def devices(self) -> list[int]:
        return self.workers.devices

    @property
    def threads(self) -> int:
        """An even share of the cores."""
        return self.options.threads or max(1, (os.cpu_count() or 1) // max(1, len(self.devices)))

    @property
    def folder(self) -> Path:
        return self.workers.folder

    def seat(self, devices: Iterable[int], kind: torch.device) -> None:
        self.started = self.workers.seat(devices, kind)

    def rename(self, devices: Mapping[int, int]) -> None:
        self.workers.rename(devices)

    def share(self, weights: FirstWeights) -> Callable[[int], FirstWeights]:
        shared = weights.in_file(self.folder / "weights.pt")
        return lambda device: shared

    def answers(self, message: Callable[[int], bytes]) -> DeviceAnswers:
        # one by one: the first worker can begin while the next one's part is cut
        self._last = self.workers.call((device, message(device)) for device in self.devices)
        answers = self._last.within(math.inf)
        assert not isinstance(answers, StillWaiting)
        return answers

    def keep_idle(self) -> None:
        if self._last is not None:
            self.workers.keep_idle(self._last)

    def end(self) -> None:
        self.workers.end()

    def close(self, error: BaseException | None = None) -> None:
        self.workers.close()
