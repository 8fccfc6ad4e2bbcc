"""What a trainer needs of the devices, wherever they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from piper.base.tracking import Alive
from piper.program.program import Program
from piper.runtime.streams.kernels import Kernel
from piper.runtime.streams.recording import Measured
from piper.state.checkpoint.hf_export import WholeTensor
from piper.state.checkpoint.index import Index
from piper.state.device.checkpoint_parts import Part
from piper.state.device.whole_tensors import Portions

T = TypeVar("T")


class ProfileKind(Enum):
    """What is to be measured of a step."""

    TIME = "time"
    KERNELS = "kernels"
    """The time, and the kernels of each instruction."""
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Report:
    """The scalars of one step, as every device knows them."""

    total: Tensor | None
    """The sum of the losses, and of what they are divided by; None if nobody asked for it."""
    norm: Tensor | None
    """The squared norm of all gradients; None if nobody asked for it, or after an evaluation."""
    memory: int
    """The most bytes that one device has held."""
    rates: tuple[float, ...] = ()
    """The learning rates that the step used, one for each group of the optimizer."""
    ready: torch.cuda.Event | None = None
    """What to wait for before ``total``, ``norm``, ``load`` and ``outputs`` are read."""
    load: Mapping[int, Tensor] = field(default_factory=dict)
    """By chunk of experts on sorted rows, how many rows each expert has."""
    outputs: Mapping[int, Tensor] = field(default_factory=dict)
    """By value, the means of the numbers that are reported beside the loss."""
    returned: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    """By device, the rows of outputs that it has, in the order of its plan's ``returned``."""
    measured: Mapping[int, tuple[Measured, ...]] = field(default_factory=dict)
    """By device, what its instructions took, if that was asked for."""
    kernels: Mapping[int, tuple[Kernel, ...]] = field(default_factory=dict)
    """By device, the kernels of its instructions, if that was asked for; on the same clock."""
    alive: Mapping[int, Alive] = field(default_factory=dict)
    """By device, the memory that its tensors took, if that was asked for."""

    def scalars(self) -> tuple[Tensor | None, Tensor | None]:
        """``total`` and ``norm``, for the current stream, which waits for them and for
        ``load`` and ``outputs``."""
        for x in (self.total, self.norm, *self.load.values(), *self.outputs.values()):
            if x is not None and self.ready is not None:
                stream = torch.cuda.current_stream(x.device)
                stream.wait_event(self.ready)
                x.record_stream(stream)
        return self.total, self.norm

    def copied(self) -> Report:
        """The same in memory of its own, which the next step does not write."""
        total, norm = (None if x is None else x.clone() for x in (self.total, self.norm))
        load = {chunk: x.clone() for chunk, x in self.load.items()}
        outputs = {value: x.clone() for value, x in self.outputs.items()}
        return replace(self, total=total, norm=norm, load=load, outputs=outputs)

    def on_host(self) -> Report:
        """The same when the GPU has got there."""
        total, norm = (None if x is None else x.cpu() for x in self.scalars())
        load = {chunk: x.cpu() for chunk, x in self.load.items()}
        outputs = {value: x.cpu() for value, x in self.outputs.items()}
        returned = {d: [x.cpu() for x in row] for d, row in self.returned.items()}
        return replace(
            self, total=total, norm=norm, load=load, outputs=outputs, returned=returned, ready=None
        )

    def at_clock(self, ahead: float) -> Report:
        """The same on a clock that this machine's is so many seconds ahead of."""
        return replace(
            self,
            measured={
                d: tuple(x._replace(start=x.start - ahead, end=x.end - ahead) for x in row)
                for d, row in self.measured.items()
            },
            kernels={
                d: tuple(x._replace(start=x.start - ahead, end=x.end - ahead) for x in row)
                for d, row in self.kernels.items()
            },
        )

    @staticmethod
    def joined(reports: Sequence[Report]) -> Report:
        """One report from those of all devices."""
        return replace(
            reports[0],
            memory=max(report.memory for report in reports),
            rates=max((report.rates for report in reports), key=len),
            returned={d: row for report in reports for d, row in report.returned.items()},
            measured={d: row for report in reports for d, row in report.measured.items()},
            kernels={d: row for report in reports for d, row in report.kernels.items()},
            alive={d: one for report in reports for d, one in report.alive.items()},
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a device could not do what it was asked; its state is as it was."""

    why: str


class WorkerGroup(Protocol):
    """All devices of a program."""

    @property
    def damaged(self) -> bool:
        """Whether a step has ended in the middle of its changes."""
        ...

    @property
    def rank(self) -> int:
        """The number of this process among those that have a trainer."""
        ...

    @property
    def trainers(self) -> int:
        """How many processes have a trainer."""
        ...

    @property
    def rows(self) -> Sequence[int] | None:
        """The rows of a batch that devices of this process read; None for all of them."""
        ...

    def once(self, call: Callable[[], T]) -> T:
        """What ``call`` gives in one of the processes that have a trainer; an error of Piper's is
        raised in all of them. They wait for each other."""
        ...

    def everyone(self, mine: Any) -> list[Any]:
        """What each of the processes that have a trainer gives; all of them ask."""
        ...

    def largest(self, number: int) -> int:
        """The largest that any of the processes that have a trainer gives; all of them ask."""
        ...

    def step(
        self, batch: Sequence[Tensor], *, report: bool = True, own_rows: bool = False
    ) -> Report:
        """Train on one batch, of which ``own_rows`` are given, ``rows``, or all."""
        ...

    def profile(self, batch: Sequence[Tensor], what: ProfileKind) -> Report:
        """Train on one batch, and measure what happens."""
        ...

    def evaluate(self, batch: Sequence[Tensor], *, own_rows: bool = False) -> Report:
        """The loss of one batch; nothing changes."""
        ...

    def export(self, only: frozenset[str] | None = None) -> list[Portions]:
        """The parameters and buffers of all devices, or those named in ``only``."""
        ...

    def refuse_other_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors to ``restore`` that the processes that have a trainer do not all give."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from other parameters and buffers."""
        ...

    def write_parts(self, folder: Path) -> list[Part | Refusal]:
        """Every device writes its part of a checkpoint; what they have written, where ``once``
        calls."""
        ...

    def begin_parts(self, folder: Path) -> None:
        """Every device begins to save its part of a checkpoint as it is now: the next step copies
        it, or whatever else is asked for before, and then it is written."""
        ...

    def written_parts(self, *, wait: bool) -> list[Part | Refusal] | None:
        """What all devices have written, where ``once`` calls; None if one is not done, unless they
        are to ``wait``."""
        ...

    def export_parts(self, folder: Path, targets: Mapping[str, WholeTensor]) -> list[Any]:
        """Every device writes its share of the model's tensors; the names that each has written, or
        why it could not, where ``once`` calls."""
        ...

    def refusals(self, folder: Path, index: Index) -> list[str]:
        """Why devices cannot go on from a checkpoint; they share the reading of its files."""
        ...

    def read_parts(self, folder: Path, index: Index) -> None:
        """Resume from a checkpoint that no device refuses."""
        ...

    def give_parts(self) -> list[Part | Refusal]:
        """What every device has of the state in memory, where ``once`` calls."""
        ...

    def prepare_switch(self, program: Program, index: Index) -> list[str]:
        """Make room for the state of ``program``, whose content ``index`` says; or why not.
        ``finish_switch`` or ``abandon_switch`` must follow."""
        ...

    def finish_switch(self) -> None:
        """Bring the state to where the next program has it, and go on with that."""
        ...

    def abandon_switch(self) -> None:
        """Forget the next program."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """End all devices; with ``error`` because of it."""
        ...
