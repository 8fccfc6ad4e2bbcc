"""One device with its plans loaded, ready to run."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.base.tracking import Alive, Tracker
from piper.capture.code.codegen import Runners
from piper.launch.device.worker_group import ProfileKind, Refusal, Report
from piper.program.program import Program
from piper.runtime.comm.protocol import Comm
from piper.runtime.context import Scalars
from piper.runtime.executor import Executor, LoadedPlan, ProgramCounter
from piper.runtime.pending import Pending
from piper.runtime.streams.recording import recorder_for
from piper.runtime.streams.stream_jitter import StreamJitter
from piper.runtime.streams.streams import streams_for
from piper.state.assignment import Assignment
from piper.state.checkpoint.index import Index, Part
from piper.state.checkpoint.slices import Slice
from piper.state.checkpoint.verify_files import damage
from piper.state.device.checkpoint_parts import (
    export_part,
    given_by,
    in_memory,
    read_part,
    write_part,
)
from piper.state.device.device_state import DeviceState, buffers_of
from piper.state.device.restore import refusal
from piper.state.device.snapshot import Snapshot, snapshot_of
from piper.state.device.whole_tensors import export, restore
from piper.state.weights.first_tensors import Fetch


class LoadedDevice:
    """An executor with one device's training and evaluation plans."""

    def __init__(
        self,
        program: Program,
        number: int,
        where: torch.device,
        comm: Comm,
        begin: Fetch | DeviceState,
        runners: Runners,
        shaker: StreamJitter | None = None,
        *,
        tracked: bool = False,
    ) -> None:
        """``begin`` returns the initial weights by name, or is the state to continue from;
        ``tracked`` says that others read the program counter, on a GPU."""
        self.number = number
        given = assignment_of(program, number)
        if not isinstance(begin, DeviceState):
            begin = DeviceState(given, where, begin)
        self.state = begin
        streams = streams_for(where, program.streams, shaker, tracked=tracked)
        self.executor = Executor(self.state, comm, streams, runners)
        self._begun: Snapshot | None = None
        """The snapshot of the last save. Copies of state that no step changes may still be under
        way."""
        self._given = given
        self._program = program
        self._training = self.executor.load(given.plan, given.code)
        self._evaluation = self.executor.load(given.evaluation_plan, given.evaluation_code)

    @cached_property
    def _saving(self) -> LoadedPlan:
        """The training plan that also copies the state being saved."""
        return self.executor.load(self._program.saving.plan_of(self.number), self._given.code)

    def show_progress_in(self, at: ProgramCounter) -> None:
        """Keep the program counter in ``at``, where others can read it."""
        self.executor.at = at

    @property
    def running(self) -> LoadedPlan:
        """The plan that was run last."""
        return self.executor.running or self._training

    def step(self, given: list[Tensor]) -> Generator[Pending, None, Report]:
        """One step of training."""
        report = yield from self.train(given)
        self.state.advance()
        return report

    def train(
        self, given: list[Tensor], *, report: bool = True
    ) -> Generator[Pending, None, Report]:
        """All instructions of a training step; the caller must still advance the state."""
        snapshot = self.state.snapshot
        loaded = self._training if snapshot is None else self._saving
        scalars = yield from self.executor.run(loaded, given, report=report)
        if snapshot is not None:  # state that no update changes has no copy instruction
            snapshot.copy_rest()
            self.state.snapshot, self._begun = None, snapshot
        return self._report(scalars, scalars.norm, self.state.rates)

    def _report(
        self, scalars: Scalars, norm: Tensor | None, rates: tuple[float, ...] = ()
    ) -> Report:
        memory = memory_of(self.state.where)
        return Report(
            total=scalars.loss,
            norm=norm,
            memory=memory,
            rates=rates,
            ready=scalars.ready,
            load=scalars.load,
            outputs=scalars.outputs,
            returned={self.number: scalars.returned} if scalars.returned else {},
        )

    def profile(self, given: list[Tensor], what: ProfileKind) -> Generator[Pending, None, Report]:
        """One step of training, measured."""
        self.finish_copies()
        return self._weighed(given) if what is ProfileKind.MEMORY else self._timed(given)

    def _timed(self, given: list[Tensor]) -> Generator[Pending, None, Report]:
        recorder = recorder_for(self.number, self.state.where)
        loaded = self.executor.load(self._given.plan, self._given.code, recorder)
        usual, self._training = self._training, loaded
        try:
            report = yield from self.step(given)
        finally:
            self._training = usual
        return replace(report, measured={self.number: recorder.take()})

    def _weighed(self, given: list[Tensor]) -> Generator[Pending, None, Report]:
        tracker = Tracker(lambda: self.executor.at[0])
        tracker.count((*self.state.tensors(), *self._training.context.constants.values()))
        state = tracker.now
        with tracker:
            own = [x.clone() for x in given]
        report = yield from tracker.over(self.step(own))
        at = "the start"
        if tracker.peak_at >= 0:
            at = self._given.plan.instructions[tracker.peak_at].name
        return replace(report, alive={self.number: Alive(state, tracker.peak, at)})

    def evaluate(self, given: list[Tensor]) -> Generator[Pending, None, Report]:
        """The forwards only; a pending snapshot of the state is copied meanwhile."""
        if self.state.snapshot is not None:
            self.state.snapshot.copy_rest()
        scalars = yield from self.executor.run(self._evaluation, given)
        self.state.changing = False
        return self._report(scalars, None)

    def abandon(self) -> None:
        """Discard a failed step."""
        for loaded in (self._training, self._evaluation, self.running):
            loaded.context.abandon()

    def finish_copies(self) -> None:
        """Finish the copies of a background save; the state may change after that."""
        for snapshot in (self.state.snapshot, self._begun):
            if snapshot is not None:
                snapshot.finish()
        self.state.snapshot = self._begun = None

    def close(self) -> None:
        """Abandon a pending snapshot: the state is no longer needed."""
        if self.state.snapshot is not None:
            self.state.snapshot.abandon()

    def export(self, only: frozenset[str] | None) -> list[Slice]:
        return export(self.state, only)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.finish_copies()
        restore(self.state, tensors)

    def write_part(self, folder: Path) -> Part | Refusal:
        """Write this device's part of a checkpoint."""
        try:
            file, buffers = self._part()
            return write_part(given_by(self.state, buffers), folder, file)
        except (OSError, PiperError) as error:
            return Refusal(str(error))

    def begin_part(self, folder: Path) -> Callable[[], Part | Refusal]:
        """A function that writes this device's part in a thread. It writes the state as it is now:
        the next step copies it."""
        file, buffers = self._part()
        try:
            part = given_by(self.state, buffers)
        except PiperError as error:
            refusal = Refusal(str(error))
            return lambda: refusal
        snapshot = self.state.snapshot = snapshot_of(part, self.state.where)

        def written() -> Part | Refusal:
            copied = snapshot.result()
            if copied is None:
                return Refusal("the trainer was closed before the state was copied")
            return write_part(copied, folder, file)

        return written

    def _part(self) -> tuple[str, tuple[str, ...]]:
        """The file of this device's part of a checkpoint, and the buffers in it."""
        file = f"device-{self.number:05}.safetensors"
        return file, _own_buffers(self._program, self.number)

    def give(self) -> tuple[Part | Refusal, Sequence[Slice]]:
        """This device's part of the state in memory, and its slices."""
        self.finish_copies()
        try:
            buffers = _own_buffers(self._program, self.number, kept=False)
            part = given_by(self.state, buffers)
        except PiperError as error:
            return Refusal(str(error)), ()
        return in_memory(part, self.number), part.slices

    def export_part(self, folder: Path, targets: Mapping[str, Slice]) -> list[str] | Refusal:
        """Write this device's share of the model's tensors."""
        try:
            buffers = _own_buffers(self._program, self.number)
            return export_part(self.state, folder, targets, buffers)
        except (OSError, PiperError) as error:
            return Refusal(str(error))

    def refusals(self, folder: Path, index: Index, share: tuple[int, int]) -> list[str]:
        """Why this device cannot resume from a checkpoint. It verifies its ``share`` of the files:
        (index of the device, number of devices)."""
        place, count = share
        files = sorted(index.files)[place::count]
        damaged = damage(folder, index, files)
        why = refusal(self.state, index)
        return damaged if why is None else [*damaged, why]

    def read_part(self, folder: Path, index: Index) -> None:
        self.finish_copies()
        read_part(self.state, folder, index)


def _own_buffers(program: Program, device: int, *, kept: bool = True) -> tuple[str, ...]:
    """The buffers that this device gives: those that no earlier device has. With ``kept``, only
    buffers in the model's state dict."""
    names = set(program.names.keys.values())
    owners: dict[str, int] = {}
    for number in program.devices:
        for name in buffers_of(assignment_of(program, number)):
            owners.setdefault(name, number)
    return tuple(
        name for name, owner in owners.items() if owner == device and (name in names or not kept)
    )


def assignment_of(program: Program, device: int) -> Assignment:
    return Assignment(
        device=device,
        plan=program.plan_of(device),
        code=program.training_step.code,
        evaluation_plan=program.evaluation_step.plan_of(device),
        evaluation_code=program.evaluation_step.code,
        buckets=program.buckets,
        parameters=program.parameters,
        order=tuple(dict.fromkeys(program.names.keys.values())),
        training=program.training,
    )


def memory_of(where: torch.device) -> int:
    """Peak bytes of this process: on the GPU, or resident memory."""
    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
