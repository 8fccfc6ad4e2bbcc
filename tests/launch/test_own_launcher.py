"""A launcher takes a worker group and a line in the table: here one whose devices are threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist

import piper
from piper.launch.device.device import WorkerDevice
from piper.launch.device.driving import alone
from piper.launch.device.local_devices import LocalDevices
from piper.launch.device.worker_group import OneTrainer
from piper.launch.launchers import LAUNCHERS, ProcessOptions, Where
from piper.launch.running import start
from piper.launch.trainer.batch_shapes import BatchShapes
from piper.launch.trainer.trainer import Trainer
from piper.launch.workers.process_links import ProcessLinks
from tests.launch.test_launchers import assert_same, compiled, trained


class ThreadWorkerGroup(OneTrainer):
    """A thread for each device of a program; they communicate over gloo."""

    def __init__(self, options: ProcessOptions) -> None:
        self._options = options
        self._store = dist.HashStore()
        self._local: dict[int, LocalDevices] = {}

    @property
    def devices(self) -> list[int]:
        return list(self._local)

    @property
    def damaged(self) -> bool:
        return any(local.damaged for local in self._local.values())

    def seat(self, devices: Iterable[int], kind: torch.device) -> None:
        self._local = {
            number: self._local.get(number) or self._seated(number, place)
            for place, number in enumerate(sorted(devices))
        }

    def _seated(self, number: int, place: int) -> LocalDevices:
        links = ProcessLinks(self._store, place, self._options, alone=True)
        device = WorkerDevice(number, links, self._options)
        return LocalDevices([device], alone, cuda_graphs=self._options.cuda_graphs)

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        def called(local: LocalDevices) -> Any:
            (answer,) = local.call(method, arguments)
            return answer

        with ThreadPoolExecutor(len(self._local)) as threads:
            return list(threads.map(called, self._local.values()))

    def close(self, error: BaseException | None = None) -> None:
        for local in self._local.values():
            local.close(abandoned=error is not None)


@pytest.mark.slow
def test_threads_train_like_virtual_devices() -> None:
    program = compiled(1)
    group = ThreadWorkerGroup(ProcessOptions(timeout=60.0))
    start(group, program)
    with Trainer(group, BatchShapes(program, 0)) as trainer:
        on_threads = trained(trainer)
    with piper.launch(program) as trainer:
        assert_same(on_threads, trained(trainer))


@pytest.mark.parametrize("where", Where)
def test_a_launcher_is_made_of_its_options(where: Where) -> None:
    """The table names classes: nothing is imported before it is launched."""
    launcher = LAUNCHERS[where]
    (given,) = inspect.signature(launcher.worker_group()).parameters
    hints = get_type_hints(launcher.worker_group().__init__)
    assert hints[given] is launcher.options
