"""``WorkerGroup``, the interface of a trainer to its devices, and ``Report``, what a step reports.

The devices may be virtual, worker processes, or processes that torchrun started.
"""

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
from piper.state.checkpoint.index import Index, Part
from piper.state.checkpoint.slices import Slice

T = TypeVar("T")


class ProfileKind(Enum):
    """What to measure in a step."""

    TIME = "time"
    KERNELS = "kernels"
    """The time, and the kernels of each instruction."""
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Report:
    """The scalars of one step, the same on every device, and what was measured of it."""

    total: Tensor | None
    """The sum of the losses and the sum of their divisors; None if not requested."""
    norm: Tensor | None
    """The squared norm of all gradients; None if not requested, or after an evaluation."""
    memory: int
    """Peak bytes of one device."""
    rates: tuple[float, ...] = ()
    """The learning rates that the step used, one for each param group."""
    ready: torch.cuda.Event | None = None
    """The event to wait for before reading ``total``, ``norm``, ``load`` and ``outputs``."""
    load: Mapping[int, Tensor] = field(default_factory=dict)
    """By expert chunk with sorted rows, the number of rows of each expert."""
    outputs: Mapping[int, Tensor] = field(default_factory=dict)
    """By value, the means of the scalars that are reported beside the loss."""
    returned: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    """By device, its rows of the outputs, in the order of its plan's ``returned``."""
    measured: Mapping[int, tuple[Measured, ...]] = field(default_factory=dict)
    """By device, the times of its instructions, if requested."""
    kernels: Mapping[int, tuple[Kernel, ...]] = field(default_factory=dict)
    """By device, the kernels of its instructions, if requested; on the same clock."""
    alive: Mapping[int, Alive] = field(default_factory=dict)
    """By device, the memory of its tensors, if requested."""

    def scalars(self) -> tuple[Tensor | None, Tensor | None]:
        """``total`` and ``norm``. The current stream waits for them, and for ``load`` and
        ``outputs``."""
        for x in (self.total, self.norm, *self.load.values(), *self.outputs.values()):
            if x is not None and self.ready is not None:
                stream = torch.cuda.current_stream(x.device)
                stream.wait_event(self.ready)
                x.record_stream(stream)
        return self.total, self.norm

    def copied(self) -> Report:
        """A copy in its own memory, which the next step does not overwrite."""
        total, norm = (None if x is None else x.clone() for x in (self.total, self.norm))
        load = {chunk: x.clone() for chunk, x in self.load.items()}
        outputs = {value: x.clone() for value, x in self.outputs.items()}
        return replace(self, total=total, norm=norm, load=load, outputs=outputs)

    def on_host(self) -> Report:
        """A copy on the host; waits for the GPU."""
        total, norm = (None if x is None else x.cpu() for x in self.scalars())
        load = {chunk: x.cpu() for chunk, x in self.load.items()}
        outputs = {value: x.cpu() for value, x in self.outputs.items()}
        returned = {d: [x.cpu() for x in row] for d, row in self.returned.items()}
        return replace(
            self, total=total, norm=norm, load=load, outputs=outputs, returned=returned, ready=None
        )

    def at_clock(self, ahead: float) -> Report:
        """The same with times on a reference clock; this machine's clock is ``ahead`` seconds ahead
        of it."""
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
        """One report from the reports of all devices."""
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
    """Why a device could not do a call; its state is unchanged."""

    why: str


class WorkerGroup(Protocol):
    """All devices of a program."""

    @property
    def damaged(self) -> bool:
        """Whether a step failed while it was changing the state."""
        ...

    @property
    def rank(self) -> int:
        """The rank of this process among the processes with a trainer."""
        ...

    @property
    def trainers(self) -> int:
        """The number of processes with a trainer."""
        ...

    @property
    def rows(self) -> Sequence[int] | None:
        """The rows of a batch that the devices of this process read; None for all rows."""
        ...

    def once(self, call: Callable[[], T]) -> T:
        """Run ``call`` in one of the processes with a trainer, and return its result in all of
        them; a PiperError is raised in all of them. They wait for each other."""
        ...

    def everyone(self, mine: Any) -> list[Any]:
        """All-gather ``mine`` over the processes with a trainer; all of them must call this."""
        ...

    def largest(self, number: int) -> int:
        """The maximum of ``number`` over the processes with a trainer; all of them must call
        this."""
        ...

    def step(
        self, batch: Sequence[Tensor], *, report: bool = True, own_rows: bool = False
    ) -> Report:
        """Train on one batch. With ``own_rows`` it has only the rows ``rows``, otherwise all."""
        ...

    def profile(self, batch: Sequence[Tensor], what: ProfileKind) -> Report:
        """Train on one batch, and measure the step."""
        ...

    def evaluate(self, batch: Sequence[Tensor], *, own_rows: bool = False) -> Report:
        """The loss of one batch; nothing changes."""
        ...

    def export(self, only: frozenset[str] | None = None) -> list[list[Slice]]:
        """The parameters and buffers of all devices, or those named in ``only``."""
        ...

    def refuse_other_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors for ``restore`` that differ between the processes with a trainer."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace parameters and buffers."""
        ...

    def write_parts(self, folder: Path) -> list[Part | Refusal]:
        """Every device writes its part of a checkpoint. Returns the parts in the process where
        ``once`` runs its call."""
        ...

    def begin_parts(self, folder: Path) -> None:
        """Every device begins to save its part of a checkpoint as it is now: the next step, or an
        earlier call that needs it, copies the state, and then it is written."""
        ...

    def written_parts(self, *, wait: bool) -> list[Part | Refusal] | None:
        """The parts of ``begin_parts``, in the process where ``once`` runs its call. Without
        ``wait``, None if a device is not done."""
        ...

    def export_parts(self, folder: Path, targets: Mapping[str, Slice]) -> list[Any]:
        """Every device writes its share of the model's tensors. Returns the names that each wrote,
        or a refusal, in the process where ``once`` runs its call."""
        ...

    def refusals(self, folder: Path, index: Index) -> list[str]:
        """Why devices cannot resume from a checkpoint; each verifies a share of its files."""
        ...

    def read_parts(self, folder: Path, index: Index) -> None:
        """Resume from a checkpoint that no device refuses."""
        ...

    def give_parts(self) -> list[Part | Refusal]:
        """Every device's part of the state in memory, in the process where ``once`` runs its
        call."""
        ...

    def prepare_switch(self, program: Program, index: Index) -> list[str]:
        """Allocate the state of ``program``; ``index`` describes the present state. Returns why it
        cannot be done, if so. ``finish_switch`` or ``abandon_switch`` must follow."""
        ...

    def finish_switch(self) -> None:
        """Move the state to the devices of the next program, and continue with that program."""
        ...

    def abandon_switch(self) -> None:
        """Drop the next program."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """End all devices; ``error`` is the reason, if training failed."""
        ...
