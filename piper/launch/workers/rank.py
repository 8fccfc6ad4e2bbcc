"""One device in its own process: its communicators, its plans, and how they run."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from piper.base.errors import PiperError
from piper.capture.code.codegen import Runners
from piper.ir.plan.instructions import COMMUNICATING
from piper.launch.device.device import LoadedDevice
from piper.launch.device.step_graph import StepGraph, refuse_uncapturable
from piper.launch.device.torch_profiler import profiled
from piper.launch.device.worker_group import ProfileKind, Refusal, Report
from piper.launch.state.background_saves import Writing
from piper.launch.watch.faults import described
from piper.program.program import Program
from piper.runtime.comm.gloo import Gloo
from piper.runtime.comm.nccl import Nccl
from piper.runtime.executor import CommunicationError
from piper.runtime.pending import Pending
from piper.runtime.streams.stream_jitter import StreamJitter
from piper.runtime.uploads import Uploads
from piper.state.checkpoint.index import Index, Part
from piper.state.checkpoint.slices import Slice
from piper.state.device.device_state import DeviceState
from piper.state.weights.first_tensors import Fetch


class Rank:
    """One device of a program in its own process."""

    def __init__(
        self,
        program: Program,
        number: int,
        where: torch.device,
        store: dist.Store,
        begin: Fetch | DeviceState,
        *,
        timeout: float,
        cuda_graphs: bool = False,
        shake: int | None = None,
        alone: bool = False,
        connecting: AbstractContextManager[None] | None = None,
    ) -> None:
        """``store`` is shared by all processes of this job and used by no other. ``begin`` returns
        the initial weights by name, or is the state to continue from. ``alone`` says that all
        processes are on this machine. With ``cuda_graphs`` steps are captured and replayed.
        ``shake`` is the seed of random stream delays. ``connecting`` is entered while the processes
        wait for each other."""
        if cuda_graphs:
            refuse_uncapturable(program)
        self.program = program
        self.number = number
        self.where = where
        plans = [step.plan_of(number) for step in program.steps]
        limit = timedelta(seconds=timeout)
        self.comm: Gloo | Nccl
        with nullcontext() if connecting is None else connecting:
            if where.type == "cuda":
                self.comm = Nccl(number, plans, store, limit, where, program.streams)
            else:
                self.comm = Gloo(number, plans, store, limit, alone=alone)
        shaker = None if shake is None else StreamJitter(shake, number)
        self.device = LoadedDevice(
            program, number, where, self.comm, begin, Runners(program.compiler), shaker,
            tracked=where.type == "cuda",
        )  # fmt: skip
        self._uploads = Uploads(where)
        self._writing: Writing | None = None
        self._graph: StepGraph | None = None
        if cuda_graphs:
            self._graph = StepGraph(where, lambda rows: finished(self.device.train(*rows)))
            if not isinstance(begin, DeviceState):
                self.device.state.make_capturable()

    def step(self, given: list[Tensor], *, report: bool = True) -> Report:
        given = self._uploads(given)
        if self._graph is None:
            result = self._finished(self.device.train(given, report=report))
        else:  # the capture includes the report, but not the copies of a save
            self.device.finish_copies()
            result = self._graph.run([given], [self.device.state.settings()])
            result = replace(result, rates=self.device.state.rates)
        self.device.state.advance()
        return result

    def evaluate(self, given: list[Tensor]) -> Report:
        return self._finished(self.device.evaluate(self._uploads(given)))

    def profile(self, given: list[Tensor], what: ProfileKind) -> Report:
        run = self.device.profile(self._uploads(given), what)
        return profiled(lambda: self._finished(run), what, self.where)

    def export(self, only: frozenset[str] | None) -> list[Slice]:
        return self.device.export(only)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.device.restore(tensors)
        self._forget_graph()

    def write_part(self, folder: Path) -> Part | Refusal:
        return self.device.write_part(folder)

    def begin_part(self, folder: Path) -> None:
        self._writing = Writing([self.device.begin_part(folder)])

    @property
    def writing(self) -> Writing:
        """The writer of the checkpoint part that was begun last."""
        assert self._writing is not None
        return self._writing

    def written_part(self) -> list[Part | Refusal]:
        """The written part; waits for it."""
        self.device.finish_copies()
        return self.writing.result()

    def export_part(self, folder: Path, targets: Mapping[str, Slice]) -> list[str] | Refusal:
        return self.device.export_part(folder, targets)

    def refusals(self, folder: Path, index: Index) -> list[str]:
        devices = self.program.devices
        return self.device.refusals(folder, index, (devices.index(self.number), len(devices)))

    def read_part(self, folder: Path, index: Index) -> None:
        self.device.read_part(folder, index)
        self._forget_graph()

    def _forget_graph(self) -> None:
        if self._graph is not None:
            self.device.state.make_capturable()
            self._graph.forget()

    def close(self, *, abandoned: bool = False) -> None:
        """Close the communicators, once the GPU is done with them. If training was ``abandoned``,
        the GPU may wait for processes that are gone, so NCCL is aborted instead."""
        self.device.close()
        self._graph = None  # it refers to the communicators
        if isinstance(self.comm, Nccl) and abandoned:
            self.comm.abort()
            return
        if self.where.type == "cuda":
            torch.cuda.synchronize(self.where)
        self.comm.close()

    def _finished(self, run: Generator[Pending, None, Report]) -> Report:
        """Like ``finished``; a communication error names the peers of this device."""
        try:
            return finished(run)
        except CommunicationError as error:
            plan = self.device.running.context.plan
            pc, cause = error.pc, error.__cause__
            if isinstance(error, LostError):
                names = [x.name if x.verb in COMMUNICATING else "" for x in plan.instructions]
                pc = names.index(error.name)
            assert pc is not None
            raise CommunicationError(
                f"device {self.number}, {described(plan, pc, self.number)}: "
                f"{type(cause).__name__}: {cause}; most likely one of those has ended or hangs: "
                "look at what it wrote first"
            ) from cause


class LostError(CommunicationError):
    """A communication failed while the host waited for it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def finished(run: Generator[Pending, None, Report]) -> Report:
    """Run a step to its end. The host waits for each pending communication; on a GPU it never has
    to."""
    while True:
        try:
            pending = next(run)
        except StopIteration as end:
            report: Report = end.value
            return report
        try:
            pending.wait()
        except Exception as error:
            run.close()
            raise LostError(pending.name) from error


def choose_gpu(local: int, number: int, *, share: bool, alone: bool) -> torch.device:
    """The GPU of the process with index ``local`` on its machine. With ``share``, several processes
    may use one GPU: NCCL is told that each is on its own host, since it refuses only processes of
    one host. ``alone`` says that this machine has all processes."""
    refuse_too_few_gpus(1, share=share)
    count = torch.cuda.device_count()
    # torch's watchdog would end the process before our monitor can report why, and would wait a
    # minute at exit for its dump
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # connect for all sizes at initialisation
    if alone:  # no other machine has to reach this process
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if share:
        os.environ.setdefault("NCCL_HOSTID", f"piper-{number}")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    # a process may see only its own GPU; two processes on one GPU are detected when they connect
    where = torch.device("cuda", local % count)
    torch.cuda.set_device(where)
    return where


def refuse_too_few_gpus(processes: int, *, share: bool) -> None:
    """Refuse a machine that lacks GPUs for its processes, unless they may share."""
    count = torch.cuda.device_count()
    if not count:
        raise PiperError("the program was compiled with device='cuda', but this machine has no GPU")
    if processes > count and not share:
        raise PiperError(
            f"{processes} processes of this machine need a GPU each, but it has {count}: use "
            "fewer, or share_gpus=True, which lets several share a GPU (to try things: they take "
            "turns and talk over sockets), or on='virtual', which puts all devices into one process"
        )
