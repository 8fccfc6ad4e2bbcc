"""What a trainer needs of the devices, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from piper.runtime.groups import Group
from piper.runtime.kernels import Kernel
from piper.runtime.portable import Portions
from piper.runtime.recording import Measured
from piper.tracking import Alive


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
    ready: torch.cuda.Event | None = None
    """What to wait for before ``total`` and ``norm`` are read."""
    measured: Mapping[int, tuple[Measured, ...]] = field(default_factory=dict)
    """By device, what its instructions took, if that was asked for."""
    kernels: Mapping[int, tuple[Kernel, ...]] = field(default_factory=dict)
    """By device, the kernels of its instructions, if that was asked for; on the same clock."""
    alive: Mapping[int, Alive] = field(default_factory=dict)
    """By device, the memory that its tensors took, if that was asked for."""

    def scalars(self) -> tuple[Tensor | None, Tensor | None]:
        """``total`` and ``norm``, for the current stream, which waits for them."""
        for x in (self.total, self.norm):
            if x is not None and self.ready is not None:
                stream = torch.cuda.current_stream(x.device)
                stream.wait_event(self.ready)
                x.record_stream(stream)
        return self.total, self.norm

    def on_host(self) -> Report:
        """The same when the GPU has got there."""
        total, norm = (None if x is None else x.cpu() for x in self.scalars())
        return replace(self, total=total, norm=norm, ready=None)

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
            measured={d: row for report in reports for d, row in report.measured.items()},
            kernels={d: row for report in reports for d, row in report.kernels.items()},
            alive={d: one for report in reports for d, one in report.alive.items()},
        )


@dataclass(frozen=True, slots=True)
class Restored:
    """A state to go on from, as whole tensors."""

    tensors: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]] | None = None
    numbers: Mapping[tuple[str, str], Any] | None = None
    steps: int | None = None
    scheduler: Mapping[str, Any] | None = None
    groups: Sequence[Group] = ()
    kind: str = ""
    """The name of the optimizer's class."""

    def part(self, names: Sequence[str]) -> Restored:
        """The same with some of the tensors only."""
        of = frozenset(names)
        kinds, numbers = self.optimizer, self.numbers
        return replace(
            self,
            tensors={n: self.tensors[n] for n in names},
            optimizer=kinds
            and {k: {n: x for n, x in row.items() if n in of} for k, row in kinds.items()},
            numbers=numbers and {key: item for key, item in numbers.items() if key[0] in of},
        )


class WorkerGroup(Protocol):
    """All devices of a program."""

    is_rank_zero: bool
    """Whether this process is the one that writes files for all."""

    @property
    def damaged(self) -> bool:
        """Whether a step has ended in the middle of its changes."""
        ...

    def barrier(self) -> None:
        """Return when all processes that have a trainer are here."""
        ...

    def step(self, batch: Sequence[Tensor], *, report: bool = True) -> Report:
        """Train on one batch."""
        ...

    def profile(self, batch: Sequence[Tensor], what: ProfileKind) -> Report:
        """Train on one batch, and measure what happens."""
        ...

    def evaluate(self, batch: Sequence[Tensor]) -> Report:
        """The loss of one batch; nothing changes."""
        ...

    def export(self, *, optimizer: bool, only: frozenset[str] | None = None) -> list[Portions]:
        """The state of all devices, or of the tensors named in ``only``."""
        ...

    def restore(self, state: Restored) -> None:
        """Go on from another state."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """End all devices; with ``error`` because of it."""
        ...
