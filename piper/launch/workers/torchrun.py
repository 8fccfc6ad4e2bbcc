"""This process is one of many that ``torchrun`` started, on one or several machines, and has one
device.

Every process runs the same script and passes the same global batch, or its own rows of it. Each
computes its own part, and all get the same loss. Rank 0 compiles, and ``call`` scatters the parts
of its program.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from piper.base.errors import PiperError
from piper.base.units import counted
from piper.launch.agreement import Agreement
from piper.launch.device.device import WorkerDevice
from piper.launch.device.driving import alone
from piper.launch.device.local_devices import COMPUTING, STARTING, LocalDevices
from piper.launch.device.worker_group import Each
from piper.launch.launchers import TorchrunOptions
from piper.launch.status.published import Published
from piper.launch.watch.ranks import watched_ranks
from piper.launch.workers.many_trainers import ManyTrainers
from piper.launch.workers.process_links import TorchrunLinks


class TorchrunWorkerGroup(ManyTrainers):
    """The device of this process, and its communication with the others."""

    def __init__(self, options: TorchrunOptions) -> None:
        self.agreement = Agreement(
            self.once, weights=options.check_weights, batches=options.check_batches
        )
        self._end_watching = watched_ranks()
        super().__init__(options.timeout)
        self._published = Published.nameless()
        self._links = TorchrunLinks(self.once(lambda: uuid.uuid4().hex), options)
        self._options = options
        self._members: list[int] = []
        """The device of each rank, in rank order."""
        self._seated: set[int] = set()
        """The devices that a call reaches; the others wait."""
        self.local = LocalDevices([], alone, cuda_graphs=options.cuda_graphs)

    @property
    def damaged(self) -> bool:
        return self.local.damaged

    @property
    def devices(self) -> list[int]:
        return [d for d in self._members[self.rank : self.rank + 1] if d in self._seated]

    def seat(self, devices: Iterable[int], kind: torch.device) -> None:
        wanted = sorted(devices)
        if not self._members:
            if self.trainers != len(wanted):
                raise PiperError(
                    f"the program runs on {counted(len(wanted), 'device')}, but torchrun started "
                    f"{counted(self.trainers, 'process')}: use --nproc-per-node and --nnodes so "
                    "that they are as many"
                )
            self._members = wanted
            self.local.devices = [WorkerDevice(wanted[self.rank], self._links, self._options)]
        if missing := [device for device in wanted if device not in self._members]:
            raise PiperError(
                f"there is no process for device {missing[0]}: torchrun started "
                f"{len(self._members)}, for devices {self._members}"
            )
        self._seated = set(wanted)

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The answer of this process's device, if it is not one that waits."""
        ahead = self.seconds_ahead() if method is WorkerDevice.profile else 0.0
        given = [self._from_rank_zero(x) if isinstance(x, Each) else x for x in arguments]
        if not self.devices:
            return []
        if self._published is not None:
            self._published.begin()
        with self._watched(method):
            answers = self.local.call(method, given)
            if method is WorkerDevice.profile:
                answers = [answer.on_host().at_clock(ahead) for answer in answers]
        if self._published is not None:
            self._published.end(self.local.devices[0], self._links.job)
        if method in (WorkerDevice.load, WorkerDevice.take):
            self._links.look_at(self.local.running)
        return answers

    def _from_rank_zero(self, given: Each) -> Any:
        """The argument of this process's device."""

        def parts() -> list[Any]:
            return [given.of(d) if d in self._seated else None for d in self._members]

        return self.scattered(parts, given.own)

    @contextmanager
    def _watched(self, method: Callable[..., Any]) -> Iterator[None]:
        """Inside, a device that computes is watched, and the others learn of an error for which
        they would wait."""
        watchdog = self._links.watchdog if method in COMPUTING else None
        try:
            with nullcontext() if watchdog is None else watchdog.over():
                yield
        except BaseException as error:
            if method in STARTING and self._links.watchdog is not None:
                self._links.watchdog.tell(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        watchdog = self._links.watchdog
        if self._end_watching is not None:
            self._end_watching()
        if watchdog is None:
            self.local.close(abandoned=error is not None)
        elif error is None:
            watchdog.close()
            self.local.close()
        else:
            with watchdog.closing(error):
                self.local.close(abandoned=True)
