"""The devices of this process: calls their methods, and runs their steps to the end.

Several devices are virtual. Their generators run in turn, each until it must wait; if none can
continue, the error says which device waits for what. A single device waits for its communications
instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from piper.launch.device.device import Running, WorkerDevice
from piper.launch.device.report import ProfileKind, Report
from piper.launch.device.step_graph import StepGraph
from piper.launch.device.torch_profiler import profiled
from piper.runtime.uploads import Uploads

COMPUTING = (WorkerDevice.step, WorkerDevice.profile, WorkerDevice.evaluate)
"""Methods whose first argument is a device's rows of a batch."""
STARTING = (WorkerDevice.load, WorkerDevice.finish)
"""Methods that connect the devices."""
_REPLACING = (WorkerDevice.load, WorkerDevice.take, WorkerDevice.restore, WorkerDevice.read_part)
"""Methods that replace tensors to which a captured step refers."""


Drive = Callable[[Sequence[WorkerDevice], Sequence[Running]], list[Report]]
"""Runs the generators of all devices to their end, and returns their reports."""


class PerDevice(ABC):
    """An argument that differs between devices."""

    @abstractmethod
    def part(self, device: WorkerDevice) -> Any:
        """The argument of a device of this process."""


class LocalDevices:
    """The devices of this process."""

    def __init__(self, devices: Sequence[WorkerDevice], drive: Drive, *, cuda_graphs: bool) -> None:
        self.devices = list(devices)
        self._drive = drive
        self._cuda_graphs = cuda_graphs
        self._graph: StepGraph | None = None
        self._uploads: Uploads | None = None

    @property
    def running(self) -> list[WorkerDevice]:
        """The devices that have a program."""
        return [device for device in self.devices if not device.waits]

    @property
    def damaged(self) -> bool:
        """Whether a step failed while it was changing the state."""
        return any(device.state.changing for device in self.running)

    def call(self, method: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """The answers of all devices to one call; a step of several devices may be one answer."""
        given = [
            [x.part(device) if isinstance(x, PerDevice) else x for x in arguments]
            for device in self.devices
        ]
        with self._current():
            if method in COMPUTING:
                return self._compute(method, given)
            answers = [method(one, *x) for one, x in zip(self.devices, given, strict=True)]
            if method in _REPLACING:
                self._graph = self._uploads = None
            return answers

    def uploaded(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of a batch on the torch device of this process."""
        if self._uploads is None:
            self._uploads = Uploads(self._where)
        return self._uploads(list(tensors))

    def drop(self, *, keep: bool) -> None:
        """After a failed call: the devices wait for a program, and release their connections. With
        ``keep`` they keep their state."""
        self._graph = self._uploads = None
        for device in self.devices:
            device.drop(keep=keep)

    def close(self, *, abandoned: bool = False) -> None:
        """End all devices."""
        self._graph = None  # it refers to the communicators
        for device in self.devices:
            device.close(abandoned=abandoned)

    @property
    def _where(self) -> torch.device:
        return self.running[0].state.where

    def _current(self) -> AbstractContextManager[Any]:
        """Inside, the torch device of this process is the current GPU: code is compiled for it, and
        runs on it by default."""
        on_gpu = bool(self.running) and self._where.type == "cuda"
        return torch.cuda.device(self._where) if on_gpu else nullcontext()

    def _compute(self, method: Callable[..., Any], given: Sequence[Sequence[Any]]) -> list[Report]:
        rows = [self.uploaded(x) for x, *_ in given]
        others = given[0][1:]
        if self._cuda_graphs and method is WorkerDevice.step:
            return [self._replayed(rows)]
        runs = [method(one, x, *others) for one, x in zip(self.devices, rows, strict=True)]
        if method is not WorkerDevice.profile:
            return self._drive(self.devices, runs)
        what: ProfileKind = others[0]
        return [profiled(lambda: Report.joined(self._drive(self.devices, runs)), what, self._where)]

    def _replayed(self, rows: list[list[Tensor]]) -> Report:
        """A captured step: it includes the report, but not the copies of a save."""
        if self._graph is None:
            self._graph = StepGraph(self._where, self._train)
        for device in self.devices:
            device.loaded.finish_copies()
        result = self._graph.run(rows, [device.state.settings() for device in self.devices])
        rates = max((device.state.rates for device in self.devices), key=len)
        for device in self.devices:
            device.state.advance()
        return replace(result, rates=rates)

    def _train(self, rows: list[list[Tensor]]) -> Report:
        runs = [one.loaded.train(x) for one, x in zip(self.devices, rows, strict=True)]
        return Report.joined(self._drive(self.devices, runs))
