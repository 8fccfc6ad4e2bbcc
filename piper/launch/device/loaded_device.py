"""One device with its plans loaded, ready to run."""

from __future__ import annotations

import resource
import sys
from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from piper.base.tracking import Alive, Tracker
from piper.ir.dag.values import Content
from piper.ir.plan.plan import Plan
from piper.launch.device.report import ProfileKind, Report
from piper.runtime.activation_sums import ActivationSums
from piper.runtime.comm.nccl import Nccl
from piper.runtime.context import Scalars
from piper.runtime.counters import AWAITED, PC, PLAN
from piper.runtime.executor import Executor, LoadedPlan, Observer
from piper.runtime.feeding import block_of
from piper.runtime.pending import Pending
from piper.runtime.streams.recording import recorder_for
from piper.state.device.element_sums import ElementSums
from piper.state.device.snapshot import Snapshot
from piper.state.device_program import DeviceProgram

_TRAINING, _EVALUATION, _SAVING = range(3)
"""Indices in ``LoadedDevice.plans``."""


class LoadedDevice:
    """An executor with one device's training and evaluation plans."""

    def __init__(self, program: DeviceProgram, executor: Executor) -> None:
        self.number = program.device
        self.program = program
        self.executor = executor
        self.state = state = executor.state
        self.comm = executor.comm
        self._gpus = gpus_of(state.where)
        self._begun: Snapshot | None = None
        """The snapshot of the last save. Copies of state that no step changes may still be under
        way."""
        self._training, self._evaluation = (self.executor.load(*step) for step in program.steps)
        self._saving: LoadedPlan | None = None
        """The training plan that also copies the state being saved, once there was a save."""

    def begin_copies(self, snapshot: Snapshot, plan: Plan) -> None:
        """The next step runs ``plan``, which also copies the state."""
        if self._saving is None:
            self._saving = self.executor.load(plan, self._training.context.code)
        self.state.snapshot = snapshot

    @property
    def plans(self) -> list[Plan]:
        """All plans that it may run."""
        loaded = (self._training, self._evaluation, self._saving)
        return [one.context.plan for one in loaded if one is not None]

    @property
    def running(self) -> LoadedPlan:
        """The plan that was run last."""
        return self.executor.running or self._training

    def unfinished(self) -> int | None:
        """On a GPU, the program counter of the first communication that has begun and not finished;
        readers outside find it, too. None if there is none, and on a CPU."""
        pc = self.running.bound.unfinished()
        if pc is not None:
            self.executor.at[PC] = self.executor.at[AWAITED] = pc
        return pc

    def step(self, given: list[Tensor], *, report: bool = True) -> Generator[Pending, None, Report]:
        """One step of training."""
        result = yield from self.train(given, report=report)
        self.state.advance()
        return result

    def train(
        self, given: list[Tensor], *, report: bool = True
    ) -> Generator[Pending, None, Report]:
        """All instructions of a training step; the caller must still advance the state."""
        snapshot = self.state.snapshot
        loaded, self.executor.at[PLAN] = self._training, _TRAINING
        if snapshot is not None:
            assert self._saving is not None
            loaded, self.executor.at[PLAN] = self._saving, _SAVING
        scalars = yield from self.executor.run(loaded, given, report=report)
        if snapshot is not None:  # state that no update changes has no copy instruction
            snapshot.copy_rest()
            self.state.snapshot, self._begun = None, snapshot
        return self._report(scalars, self.state.rates)

    def _report(self, scalars: Scalars, rates: tuple[float, ...] = ()) -> Report:
        memory = memory_of(self.state.where)
        return Report(
            total=scalars.sums.get((Content.LOSS, 0)),
            norm=scalars.sums.get((Content.NORM, 0)),
            memory=memory,
            gpus=self._gpus,
            rates=rates,
            ready=scalars.ready,
            load=scalars.each(Content.LOAD),
            outputs=scalars.each(Content.OUTPUT),
        )

    def profile(self, given: list[Tensor], what: ProfileKind) -> Generator[Pending, None, Report]:
        """One step of training, measured."""
        self.finish_copies()
        if what is ProfileKind.REGIONS:
            return self._summed(given)
        return self._weighed(given) if what is ProfileKind.MEMORY else self._timed(given)

    def _summed(self, given: list[Tensor]) -> Generator[Pending, None, Report]:
        activations, gradients = ActivationSums(), dict[str, ElementSums]()
        self.state.gradient_sums = gradients
        try:
            report = yield from self._observed(given, activations)
        finally:
            self.state.gradient_sums = None
        return replace(
            report, gradients={self.number: gradients}, activations={self.number: activations}
        )

    def _timed(self, given: list[Tensor]) -> Generator[Pending, None, Report]:
        recorder = recorder_for(self.number, self.state.where)
        report = yield from self._observed(given, recorder)
        return replace(report, measured={self.number: recorder.take()})

    def _observed(
        self, given: list[Tensor], observer: Observer
    ) -> Generator[Pending, None, Report]:
        loaded = self.executor.load(*self.program.steps[0], observer)
        usual, self._training = self._training, loaded
        try:
            return (yield from self.step(given))
        finally:
            self._training = usual

    def _weighed(self, given: list[Tensor]) -> Generator[Pending, None, Report]:
        tracker = Tracker(lambda: self.executor.at[PC])
        tracker.count((*self.state.tensors(), *self._training.context.constants.values()))
        state = tracker.now
        with tracker:
            own = [x.clone() for x in given]
        report = yield from tracker.over(self.step(own))
        at = "the start"
        if tracker.peak_at >= 0:
            at = self._training.context.plan.instructions[tracker.peak_at].name
        return replace(report, alive={self.number: Alive(state, tracker.peak, at)})

    def evaluate(self, given: list[Tensor]) -> Generator[Pending, None, Report]:
        """The forwards only; a pending snapshot of the state is copied meanwhile."""
        if self.state.snapshot is not None:
            self.state.snapshot.copy_rest()
        self.executor.at[PLAN] = _EVALUATION
        scalars = yield from self.executor.run(self._evaluation, given)
        self.state.changing = False
        places = [
            (value, block_of(microbatch, shards, self.number))
            for _, value, microbatch, shards in self._evaluation.context.plan.returned
        ]
        returned = dict(zip(places, scalars.returned, strict=True))
        return replace(self._report(scalars), returned=returned)

    def abandon(self) -> None:
        """Discard a failed step."""
        for loaded in (self._training, self._evaluation, self.running):
            loaded.context.abandon()

    def end_waiting(self) -> None:
        """On a GPU, end kernels that wait for others: the call has failed. Any thread may call
        it."""
        if isinstance(self.comm, Nccl):
            self.comm.abort()

    def finish_copies(self) -> None:
        """Finish the copies of a background save; the state may change after that."""
        for snapshot in (self.state.snapshot, self._begun):
            if snapshot is not None:
                snapshot.finish()
        self.state.snapshot = self._begun = None

    def close(self, *, abandoned: bool = False) -> None:
        """Close the communicators, once the GPU is done with them, and abandon a pending snapshot:
        the state is no longer needed. If training was ``abandoned``, the GPU may wait for processes
        that are gone, so NCCL is aborted instead."""
        if self.state.snapshot is not None:
            self.state.snapshot.abandon()
            self.state.snapshot = None
        if abandoned and isinstance(self.comm, Nccl):
            self.end_waiting()
            return
        if self.state.where.type == "cuda" and not abandoned:
            torch.cuda.synchronize(self.state.where)
        self.comm.close()


def gpus_of(where: torch.device) -> tuple[str, ...]:
    """The name and the UUID of a GPU; nothing for a CPU."""
    if where.type != "cuda":
        return ()
    facts = torch.cuda.get_device_properties(where)
    return (f"{facts.name} {facts.uuid}",)


def memory_of(where: torch.device) -> int:
    """Peak bytes of this process: on the GPU, or resident memory."""
    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
