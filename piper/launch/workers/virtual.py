"""All devices in this process, on one CPU or one GPU, in a deterministic order.

The devices' generators run in turn, each until it must wait. If none can continue, the error says
which device waits for what.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.capture.code.codegen import Runners
from piper.launch.device.device import LoadedDevice
from piper.launch.device.step_graph import StepGraph, refuse_uncapturable
from piper.launch.device.torch_profiler import profiled
from piper.launch.device.worker_group import ProfileKind, Refusal, Report, T
from piper.launch.state.background_saves import Writing
from piper.launch.state.switch import NextState
from piper.program.compiled import Step
from piper.program.program import Program
from piper.runtime.comm.loopback import Hub, Loopback
from piper.runtime.feeding import cut
from piper.runtime.pending import Pending
from piper.runtime.streams.stream_jitter import StreamJitter
from piper.runtime.uploads import Uploads
from piper.state.checkpoint.index import Index, Part
from piper.state.checkpoint.slices import Slice
from piper.state.device.device_state import DeviceState
from piper.state.device.resharding import copied
from piper.state.weights.first_tensors import Fetch


class VirtualWorkerGroup:
    """Every device of a program as an object in this process."""

    @property
    def damaged(self) -> bool:
        return any(device.state.changing for device in self._devices)

    rank = 0
    trainers = 1

    def once(self, call: Callable[[], T]) -> T:
        return call()

    def everyone(self, mine: Any) -> list[Any]:
        return [mine]

    def largest(self, number: int) -> int:
        return number

    def __init__(
        self,
        program: Program,
        fetch: Fetch,
        *,
        cuda_graphs: bool = False,
        shake: int | None = None,
    ) -> None:
        """With ``cuda_graphs``, a step is captured as one CUDA graph and replayed. ``shake`` is the
        seed of random stream delays, to find races."""
        if cuda_graphs:
            refuse_uncapturable(program)
        self._cuda_graphs = cuda_graphs
        self._shake = shake
        self._writing: Writing | None = None
        self._given: dict[int, Sequence[Slice]] = {}
        self._next: tuple[Program, Index, dict[int, NextState]] | None = None
        self._start(program, dict.fromkeys(program.devices, fetch))
        if self._graph is not None:
            for device in self._devices:
                device.state.make_capturable()

    def _start(self, program: Program, begin: Mapping[int, Fetch | DeviceState]) -> None:
        """Load the plans of all devices; a failure changes nothing."""
        where = _numbered(program.device)
        hub = Hub(where.type == "cuda")
        runners = Runners(program.compiler)
        with _current(where):
            devices = [
                LoadedDevice(
                    program,
                    number,
                    where,
                    Loopback(hub, number),
                    begin[number],
                    runners,
                    None if self._shake is None else StreamJitter(self._shake, number),
                )
                for number in program.devices
            ]
        self._program, self._hub, self._devices = program, hub, devices
        self._where, self._uploads = where, Uploads(where)
        self._graph: StepGraph | None = None
        if self._cuda_graphs:
            self._graph = StepGraph(where, self._train)

    @property
    def rows(self) -> None:
        """None: all rows."""
        return

    def step(
        self, batch: Sequence[Tensor], *, report: bool = True, own_rows: bool = False
    ) -> Report:
        with _current(self._where):
            parts = self._cut(self._program.training_step, batch)
            if self._graph is None:
                result = self._train(parts, report=report)
            else:  # the capture includes the report, but not the copies of a save
                for device in self._devices:
                    device.finish_copies()
                result = self._graph.run(parts, [d.state.settings() for d in self._devices])
                rates = max((device.state.rates for device in self._devices), key=len)
                result = replace(result, rates=rates)
            for device in self._devices:
                device.state.advance()
        return result

    def _train(self, parts: list[list[Tensor]], *, report: bool = True) -> Report:
        both = zip(self._devices, parts, strict=True)
        return self._drive([device.train(part, report=report) for device, part in both])

    def profile(self, batch: Sequence[Tensor], what: ProfileKind) -> Report:
        with _current(self._where):
            parts = self._cut(self._program.training_step, batch)
            runs = [d.profile(p, what) for d, p in zip(self._devices, parts, strict=True)]
            return profiled(lambda: self._drive(runs), what, self._where)

    def evaluate(self, batch: Sequence[Tensor], *, own_rows: bool = False) -> Report:
        with _current(self._where):
            parts = self._cut(self._program.evaluation_step, batch)
            return self._drive([d.evaluate(p) for d, p in zip(self._devices, parts, strict=True)])

    def export(self, only: frozenset[str] | None = None) -> list[list[Slice]]:
        return [device.export(only) for device in self._devices]

    def refuse_other_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        return

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for device in self._devices:
            device.restore(tensors)
        self._forget_graph()

    def write_parts(self, folder: Path) -> list[Part | Refusal]:
        return [device.write_part(folder) for device in self._devices]

    def begin_parts(self, folder: Path) -> None:
        self._writing = Writing([device.begin_part(folder) for device in self._devices])

    def written_parts(self, *, wait: bool) -> list[Part | Refusal] | None:
        assert self._writing is not None
        if not wait and not self._writing.done:
            return None
        for device in self._devices:
            device.finish_copies()
        return self._writing.result()

    def export_parts(self, folder: Path, targets: Mapping[str, Slice]) -> list[Any]:
        return [device.export_part(folder, targets) for device in self._devices]

    def refusals(self, folder: Path, index: Index) -> list[str]:
        count = len(self._devices)
        rows = [d.refusals(folder, index, (i, count)) for i, d in enumerate(self._devices)]
        return [why for row in rows for why in row]

    def read_parts(self, folder: Path, index: Index) -> None:
        for device in self._devices:
            device.state.changing = True
        for device in self._devices:
            device.read_part(folder, index)
        self._forget_graph()

    def _forget_graph(self) -> None:
        if self._graph is not None:
            for device in self._devices:
                device.state.make_capturable()
            self._graph.forget()

    def give_parts(self) -> list[Part | Refusal]:
        parts = []
        for device in self._devices:
            part, self._given[device.number] = device.give()
            parts.append(part)
        return parts

    def prepare_switch(self, program: Program, index: Index) -> list[str]:
        present = {device.number: device for device in self._devices}
        rooms: dict[int, NextState] = {}
        self._next = program, index, rooms
        for number in program.devices:
            rooms[number] = NextState(
                program, number, _numbered(program.device), index, present.get(number),
                capturable=self._cuda_graphs,
            )  # fmt: skip
            if rooms[number].refused:
                break
        return [why for room in rooms.values() for why in room.refused]

    def finish_switch(self) -> None:
        assert self._next is not None
        program, index, rooms = self._next
        for room in rooms.values():
            copied(room.missing, index, self._given)
        states = {number: room.settled() for number, room in rooms.items()}
        if program.device.type == "cuda":
            torch.cuda.synchronize(program.device)  # nothing reads the old state any more
        try:
            self._start(program, states)
        finally:
            self.abandon_switch()

    def abandon_switch(self) -> None:
        self._next = None
        self._given = {}

    def close(self, error: BaseException | None = None) -> None:
        self._graph = None
        for device in self._devices:
            device.close()
        self._devices.clear()

    def _cut(self, step: Step, batch: Sequence[Tensor]) -> list[list[Tensor]]:
        of = {device: plan for plan in step.plans for device in plan.devices}
        batch = self._uploads(list(batch))
        return [cut(of[d.number], step.code, d.number, batch) for d in self._devices]

    def _drive(self, runs: list[Generator[Pending, None, Report]]) -> Report:
        """Run all generators to their end, taking turns."""
        try:
            return self._turns(runs)
        except BaseException:
            for run in runs:
                run.close()
            for device in self._devices:
                device.abandon()
            self._hub.clear()
            raise

    def _turns(self, runs: list[Generator[Pending, None, Report]]) -> Report:
        waiting: dict[int, Pending | None] = dict.fromkeys(range(len(runs)))
        reports: list[Report] = []
        while waiting:
            moved = False
            for i, pending in list(waiting.items()):
                if pending is not None and not pending.done():
                    continue
                moved = True
                try:
                    waiting[i] = next(runs[i])
                except StopIteration as end:
                    del waiting[i]
                    reports.append(end.value)
            if not moved:
                raise PiperError(self._stuck(waiting))
        return Report.joined(reports)

    def _stuck(self, waiting: dict[int, Pending | None]) -> str:
        lines = ["no device can continue:"]
        for i, pending in waiting.items():
            device = self._devices[i]
            assert pending is not None
            at = device.executor.at[0]
            lines.append(f"  device {device.number} at instruction {at} waits for {pending.name}")
        lines += [f"  {line}" for line in self._hub.waiting()]
        return "\n".join(lines)


def _numbered(device: torch.device) -> torch.device:
    """``device`` with an index: the current GPU, unless it has one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _current(where: torch.device) -> AbstractContextManager[Any]:
    """Inside, ``where`` is the current GPU: code is compiled for it, and runs on it by default."""
    return torch.cuda.device(where) if where.type == "cuda" else nullcontext()
