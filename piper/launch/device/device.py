"""What a device can do: the methods that a worker group can call.

A device lives in some process, with others of its program or alone, and has a program or waits for
one. A method that computes returns a generator over the communications that it waits for; the
caller drives the generators of all devices of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.capture.code.codegen import Runners
from piper.ir.plan.plan import Plan
from piper.launch.device.loaded_device import LoadedDevice
from piper.launch.device.next_state import NextState
from piper.launch.device.report import ProfileKind, Refusal, Report
from piper.launch.device.step_graph import refuse_uncapturable
from piper.launch.launchers import Options
from piper.launch.state.writing import written_by
from piper.runtime.comm.protocol import Comm
from piper.runtime.executor import Executor
from piper.runtime.feeding import rows_read
from piper.runtime.pending import Pending
from piper.runtime.streams.stream_jitter import StreamJitter
from piper.runtime.streams.streams import streams_for
from piper.state.checkpoint.index import GroupEntry, Index, Part
from piper.state.checkpoint.slices import Slice
from piper.state.checkpoint.verify_files import damage
from piper.state.device.checkpoint_parts import (
    export_part,
    given_by,
    in_memory,
    read_part,
    write_part,
)
from piper.state.device.device_state import DeviceState
from piper.state.device.optimizer_groups import export_groups
from piper.state.device.restore import refusal
from piper.state.device.snapshot import snapshot_of
from piper.state.device.whole_tensors import export, restore
from piper.state.device_program import DeviceProgram
from piper.state.weights.first_tensors import Fetch

Running = Generator[Pending, None, Report]


class Links(Protocol):
    """What the process of a device provides: a torch device, and links to the other devices."""

    tracked: bool
    """Whether others read the program counter on a GPU."""
    gives: dict[int, Sequence[Slice]]
    """The slices that each device of this process gives in a switch."""

    def place(self, kind: torch.device) -> torch.device:
        """The torch device of this process."""
        ...

    def connect(
        self, job: str, program: DeviceProgram, where: torch.device
    ) -> tuple[Comm, Runners]:
        """Connect the devices of ``program``; all of them do so. ``job`` names this connection.
        Also returns the compiled programs, which the devices of a process share."""
        ...

    def exchange(
        self, job: str, number: int, room: NextState, wants: Mapping[int, Sequence[Slice]]
    ) -> None:
        """Take part, as device ``number``, in moving all wanted slices between the devices."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """Whether a device can switch, and the slices that it needs from others."""

    device: int
    refused: list[str]
    requests: list[Slice]


class WorkerDevice:
    """One device of a worker group."""

    def __init__(self, number: int, links: Links, options: Options) -> None:
        self.number = number
        self.links = links
        self._options = options
        self._loaded: LoadedDevice | None = None
        """None while this device waits for a program."""
        self._kept: DeviceState | None = None
        """The state before a failed call."""
        self._next: NextState | None = None
        self._writing: Future[Part | Refusal] | None = None

    # programs

    @property
    def waits(self) -> bool:
        """Whether it has no program."""
        return self._loaded is None

    @property
    def loaded(self) -> LoadedDevice:
        assert self._loaded is not None
        return self._loaded

    @property
    def state(self) -> DeviceState:
        return self.loaded.state

    def load(self, job: str, program: DeviceProgram, fetch: Fetch) -> None:
        """Begin to run ``program``, with the initial weights that ``fetch`` returns by name."""
        self.drop()
        self.number = program.device  # a worker may take the place of a lost one
        self._loaded = self._load(
            job, program, self.links.place(program.kind), lambda at: DeviceState(program, at, fetch)
        )
        if self._options.cuda_graphs:
            self.state.make_capturable()

    def _load(
        self,
        job: str,
        program: DeviceProgram,
        where: torch.device,
        state: Callable[[torch.device], DeviceState],
    ) -> LoadedDevice:
        if self._options.cuda_graphs:
            refuse_uncapturable(program)
        comm, runners = self.links.connect(job, program, where)
        seed = self._options.shake
        jitter = None if seed is None else StreamJitter(seed, self.number)
        streams = streams_for(where, program.streams, jitter, tracked=self.links.tracked)
        return LoadedDevice(program, Executor(state(where), comm, streams, runners))

    def rows_read(self) -> set[int]:
        """The numbers of the rows of a batch that this device reads."""
        program = self.loaded.program
        return set().union(*(rows_read(*step, self.number) for step in program.steps))

    # steps

    def step(self, given: list[Tensor], report: bool) -> Running:
        """Train on this device's rows of a batch."""
        return self.loaded.step(given, report=report)

    def profile(self, given: list[Tensor], what: ProfileKind) -> Running:
        """Train on this device's rows of a batch, and measure the step."""
        return self.loaded.profile(given, what)

    def evaluate(self, given: list[Tensor]) -> Running:
        """The loss of this device's rows of a batch; nothing changes."""
        return self.loaded.evaluate(given)

    # whole tensors

    def export(self, only: frozenset[str] | None) -> list[Slice]:
        """The parameters and buffers that this device has, or those named in ``only``."""
        return export(self.state, only)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace parameters and buffers."""
        self.loaded.finish_copies()
        restore(self.state, tensors)
        self._replaced()

    def swap_averages(self) -> None:
        """Exchange the trained weights and their averages."""
        self.loaded.finish_copies()
        self.state.swap_averages()

    def groups(self) -> list[GroupEntry]:
        """The settings of the optimizer's param groups."""
        return export_groups(self.state)

    def _replaced(self) -> None:
        if self._options.cuda_graphs:
            self.state.make_capturable()

    # checkpoints

    def write_part(self, folder: Path) -> Part | Refusal:
        """Write this device's part of a checkpoint."""
        return self._written_part(folder, self._buffers)

    def write_copy(self, folder: Path) -> Part | Refusal:
        """Write this device's part of the state, also the buffers that no checkpoint has."""
        return self._written_part(folder, self.loaded.program.gives)

    def _written_part(self, folder: Path, buffers: Collection[str]) -> Part | Refusal:
        try:
            return write_part(given_by(self.state, buffers), folder, self._file)
        except (OSError, PiperError) as error:
            return Refusal(str(error))

    def begin_part(self, folder: Path, plan: Plan) -> None:
        """Begin to save this device's part of a checkpoint as it is now. The next step runs
        ``plan``, which also copies the state, unless another call must copy it first. A thread then
        writes the copy."""
        self._writing = written_by(self._begun_part(folder, plan))

    def _begun_part(self, folder: Path, plan: Plan) -> Callable[[], Part | Refusal]:
        try:
            part = given_by(self.state, self._buffers)
        except PiperError as error:
            refused = Refusal(str(error))
            return lambda: refused
        snapshot, file = snapshot_of(part, self.state.where), self._file
        self.loaded.begin_copies(snapshot, plan)

        def written() -> Part | Refusal:
            copied = snapshot.result()
            if copied is None:
                return Refusal("the trainer was closed before the state was copied")
            return write_part(copied, folder, file)

        return written

    @property
    def writing(self) -> Future[Part | Refusal]:
        """The part that was begun last."""
        assert self._writing is not None
        return self._writing

    def part_is_written(self) -> bool:
        return self.writing.done()

    def written_part(self) -> Part | Refusal:
        """The part of ``begin_part``; waits for it."""
        self.loaded.finish_copies()
        return self.writing.result()

    def export_part(self, folder: Path, targets: Mapping[str, Slice]) -> list[str] | Refusal:
        """Write this device's share of the model's tensors. Returns their names."""
        try:
            return export_part(self.state, folder, targets, self._buffers)
        except (OSError, PiperError) as error:
            return Refusal(str(error))

    def refusals(self, folder: Path, index: Index) -> list[str]:
        """Why this device cannot resume from a checkpoint. It verifies its share of the files."""
        devices = self.loaded.program.devices
        files = sorted(index.files)[devices.index(self.number) :: len(devices)]
        damaged = damage(folder, index, files)
        why = refusal(self.state, index)
        return damaged if why is None else [*damaged, why]

    def read_part(self, folder: Path, index: Index) -> None:
        """Resume from a checkpoint that no device refuses."""
        self.state.changing = True
        self.loaded.finish_copies()
        read_part(self.state, folder, index)
        self._replaced()

    def spoil(self) -> None:
        """Another device could not resume: the state is between two steps."""
        self.state.changing = True

    @property
    def _file(self) -> str:
        return f"device-{self.number:05}.safetensors"

    @property
    def _buffers(self) -> Collection[str]:
        """The buffers of the model's state dict that this device gives."""
        program = self.loaded.program
        return [name for name in program.gives if name in program.order]

    # a switch

    def give(self) -> Part | Refusal:
        """This device's part of the state, in memory."""
        self.loaded.finish_copies()
        try:
            part = given_by(self.state, self.loaded.program.gives)
        except PiperError as error:
            return Refusal(str(error))
        self.links.gives[self.number] = part.slices
        return in_memory(part, self.number)

    def give_kept(self) -> Part | None:
        """All that this device has of the state before the failed call, in memory; None if the call
        has begun to change it."""
        if self._kept is None:
            return None
        part = given_by(self._kept, tuple(self._kept.buffers), lambda layout: layout.fragments)
        self.links.gives[self.number] = part.slices
        return in_memory(part, self.number)

    def prepare(self, program: DeviceProgram | None, index: Index) -> Prepared:
        """Allocate the state of ``program`` beside the present one, which ``index`` describes.
        ``program`` is None if it does not have this device. ``finish`` or ``abandon`` must
        follow."""
        room = self._next = NextState(
            program,
            torch.device("cpu") if program is None else self.links.place(program.kind),
            index,
            self._kept if self._loaded is None else self.state,
            capturable=self._options.cuda_graphs,
        )
        return Prepared(self.number, room.refused, room.requests)

    def finish(self, job: str, wants: Mapping[int, Sequence[Slice]]) -> None:
        """Move the state to the devices of the next program, and load that program. The present one
        still stays."""
        room = self._next
        assert room is not None
        self.links.exchange(job, self.number, room, wants)
        if room.program is not None:
            state = room.settled()
            room.loaded = self._load(job, room.program, state.where, lambda _: state)

    def take(self) -> None:
        """Continue with the next program."""
        assert self._next is not None
        before, self._loaded = self._loaded, self._next.loaded
        self._kept = None
        self.abandon()
        if self._loaded is not None:
            self.number = self._loaded.number
        if before is not None:
            before.close()

    def abandon(self) -> None:
        """Drop the next program."""
        self._next = None
        self.links.gives.pop(self.number, None)

    def drop(self, *, keep: bool = False) -> None:
        """Wait for a program again, after a failed call. With ``keep`` the state stays, unless the
        call has begun to change it."""
        self.abandon()
        before, self._loaded = self._loaded, None
        self._kept = None
        # a GPU may still update what the host has left behind as finished
        if keep and before and not before.state.changing and before.state.where.type == "cpu":
            self._kept = before.state
        if before is not None:
            before.close(abandoned=True)

    def close(self, *, abandoned: bool = False) -> None:
        """End; training may have been ``abandoned`` with an error."""
        if self._loaded is not None:
            self._loaded.close(abandoned=abandoned)
