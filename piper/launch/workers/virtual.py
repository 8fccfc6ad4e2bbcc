"""All devices in this process, on one CPU or one GPU, in a deterministic order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from piper.capture.code.codegen import Runners
from piper.launch.device.device import WorkerDevice
from piper.launch.device.driving import in_turns
from piper.launch.device.local_devices import LocalDevices
from piper.launch.device.next_state import NextState
from piper.launch.device.worker_group import BatchRows, OneTrainer
from piper.launch.launchers import Options
from piper.runtime.comm.loopback import Hub, Loopback
from piper.state.checkpoint.slices import Slice
from piper.state.device.resharding import copied
from piper.state.device_program import DeviceProgram


class VirtualWorkerGroup(OneTrainer):
    """Every device of a program as an object in this process."""

    def __init__(self, options: Options) -> None:
        self._options = options
        links = self._links = _Links()
        drive = partial(in_turns, lambda: links.hub)
        self.local = LocalDevices([], drive, cuda_graphs=options.cuda_graphs)

    @property
    def damaged(self) -> bool:
        return self.local.damaged

    @property
    def devices(self) -> list[int]:
        return [device.number for device in self.local.devices]

    def seat(self, devices: Iterable[int], kind: torch.device) -> None:
        present = {device.number: device for device in self.local.devices}
        self.local.devices = [
            present.get(number) or WorkerDevice(number, self._links, self._options)
            for number in sorted(devices)
        ]

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        given = [
            replace(x, batch=self.local.uploaded(x.batch)) if isinstance(x, BatchRows) else x
            for x in arguments
        ]
        return self.local.call(method, given)

    def close(self, error: BaseException | None = None) -> None:
        self.local.close(abandoned=error is not None)


class _Links:
    """The links between devices of one process."""

    tracked = False

    def __init__(self) -> None:
        self.hub = Hub(accelerator=False)
        self.gives: dict[int, Sequence[Slice]] = {}
        self._job = ""
        self._runners: Runners | None = None

    def place(self, kind: torch.device) -> torch.device:
        """``kind`` with an index: the current GPU, unless it has one."""
        if kind.type == "cuda" and kind.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return kind

    def connect(
        self, job: str, program: DeviceProgram, where: torch.device
    ) -> tuple[Loopback, Runners]:
        if self._runners is None or job != self._job:
            self._job, self._runners = job, Runners(program.compiler, where)
            self.hub = Hub(where.type == "cuda")
        return Loopback(self.hub, program.device), self._runners

    def exchange(
        self, job: str, number: int, room: NextState, wants: Mapping[int, Sequence[Slice]]
    ) -> None:
        copied(room.missing, room.index, self.gives)
