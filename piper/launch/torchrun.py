"""This process is one device of many that ``torchrun`` started, on one machine or several.

Every process runs the same script, compiles the same program and gives the same global batch; each
computes its own part, and every one of them gets the same loss.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.capture.codegen import Runners
from piper.errors import PiperError
from piper.launch.clock import seconds_ahead
from piper.launch.crew import Report, Restored, Watch
from piper.launch.device import Device
from piper.launch.watching import watched
from piper.program import Program
from piper.runtime.distributed import Distributed
from piper.runtime.feeding import cut
from piper.runtime.pending import Pending
from piper.runtime.portable import Portions
from piper.runtime.state import Fetch


class TorchrunCrew:
    """This process's device, and what it knows of the others."""

    def __init__(self, program: Program, fetch: Fetch, *, timeout: float = 600.0) -> None:
        limit = timedelta(seconds=timeout)
        where = _where(program)
        if not dist.is_initialized():
            _refuse_alone()
            dist.init_process_group("nccl" if where.type == "cuda" else "gloo", timeout=limit)
            # not before: torch could not begin again on the same rendezvous, for another program
            atexit.register(_end)
        devices = program.devices
        if dist.get_world_size() != len(devices):
            raise PiperError(
                f"the program runs on {len(devices)} devices, but torchrun started "
                f"{dist.get_world_size()} processes: use --nproc-per-node and --nnodes so that "
                "they are as many"
            )
        self._program = program
        self._number = devices[dist.get_rank()]
        plans = (*program.plans, *program.evaluation_plans)
        self._comm = Distributed(self._number, devices, plans, limit, program.streams)
        self._device = Device(
            program, self._number, where, self._comm, fetch, Runners(program.compiler)
        )
        self._objects = dist.new_group(backend="gloo", timeout=limit)
        self.leads = dist.get_rank() == 0

    def meet(self) -> None:
        dist.barrier(group=self._objects)

    def step(self, batch: Sequence[Tensor]) -> Report:
        program = self._program
        plan = program.plan_of(self._number)
        return _finished(self._device.step(cut(plan, program.code, self._number, batch)))

    def watch(self, batch: Sequence[Tensor], what: Watch) -> Report:
        program = self._program
        plan = program.plan_of(self._number)
        run = self._device.watch(cut(plan, program.code, self._number, batch), what)
        ahead = seconds_ahead(self._objects)
        report = watched(lambda: _finished(run), what, self._device.state.where)
        report = report.at_clock(ahead)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, report, group=self._objects)
        return Report.joined([report, *everyone])

    def evaluate(self, batch: Sequence[Tensor]) -> Report:
        program = self._program
        plan = next(p for p in program.evaluation_plans if self._number in p.devices)
        given = cut(plan, program.evaluation_code, self._number, batch)
        return _finished(self._device.evaluate(given))

    def export(self, *, optimizer: bool, only: frozenset[str] | None = None) -> list[Portions]:
        mine = self._device.export(optimizer=optimizer, only=only)
        everyone: list[Portions | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._objects)
        return [portions for portions in everyone if portions is not None]

    def restore(self, state: Restored) -> None:
        self._device.restore(state)

    def close(self) -> None:
        self._comm.close()


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _refuse_alone() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise PiperError(
            f"on='torchrun' needs {', '.join(missing)} in the environment: start the script with "
            "torchrun --nproc-per-node N script.py"
        )


def _where(program: Program) -> torch.device:
    if program.device.type != "cuda":
        return program.device
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _finished(run: Generator[Pending, None, Report]) -> Report:
    while True:
        try:
            next(run).wait()
        except StopIteration as end:
            report: Report = end.value
            return report
