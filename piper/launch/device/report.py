"""``Report``, the result of one step, and ``Refusal``, why a device could not do a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from piper.base.tracking import Alive
from piper.runtime.activation_sums import ActivationSums
from piper.runtime.streams.kernels import Kernel
from piper.runtime.streams.recording import Measured
from piper.state.device.element_sums import ElementSums


class ProfileKind(Enum):
    """What to measure in a step."""

    TIME = "time"
    KERNELS = "kernels"
    """The time, and the kernels of each instruction."""
    MEMORY = "memory"
    REGIONS = "regions"
    """Sums over the gradients and the activations."""


@dataclass(frozen=True, slots=True)
class Report:
    """The scalars of one step, the same on every device, and what was measured of it."""

    total: Tensor | None
    """The sum of the losses and the sum of their divisors; None if not requested."""
    norm: Tensor | None
    """The squared norm of all gradients; None if not requested, or after an evaluation."""
    memory: int
    """Peak bytes of one device."""
    gpus: tuple[str, ...] = ()
    """For each device, the name and the UUID of its GPU; empty on CPUs."""
    rates: tuple[float, ...] = ()
    """The learning rates that the step used, one for each param group."""
    ready: torch.cuda.Event | None = None
    """The event to wait for before reading ``total``, ``norm``, ``load`` and ``outputs``."""
    load: Mapping[int, Tensor] = field(default_factory=dict)
    """By expert chunk with sorted rows, the number of rows of each expert."""
    outputs: Mapping[int, Tensor] = field(default_factory=dict)
    """By value, the means of the scalars that are reported beside the loss."""
    returned: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)
    """By value and row block, the rows of the outputs."""
    measured: Mapping[int, tuple[Measured, ...]] = field(default_factory=dict)
    """By device, the times of its instructions, if requested."""
    kernels: Mapping[int, tuple[Kernel, ...]] = field(default_factory=dict)
    """By device, the kernels of its instructions, if requested; on the same clock."""
    alive: Mapping[int, Alive] = field(default_factory=dict)
    """By device, the memory of its tensors, if requested."""
    gradients: Mapping[int, Mapping[str, ElementSums]] = field(default_factory=dict)
    """By device and parameter, the sums of the gradients, if requested."""
    activations: Mapping[int, ActivationSums] = field(default_factory=dict)
    """By device, the sums of the activations, if requested."""

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
        return self._with_tensors(Tensor.clone)

    def on_host(self) -> Report:
        """A copy on the host; waits for the GPU."""
        self.scalars()
        return replace(self._with_tensors(Tensor.cpu), ready=None)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> Report:
        """The same with each tensor changed."""
        names = ("total", "norm", "load", "outputs", "returned")
        parts = {name: pytree.tree_map_only(Tensor, change, getattr(self, name)) for name in names}
        return replace(self, **parts)

    def at_clock(self, ahead: float) -> Report:
        """The same with times on a reference clock; this machine's clock is ``ahead`` seconds ahead
        of it."""
        measured, kernels = earlier(self.measured, ahead), earlier(self.kernels, ahead)
        return replace(self, measured=measured, kernels=kernels)

    @staticmethod
    def joined(reports: Sequence[Report]) -> Report:
        """One report from the reports of all devices."""
        names = ("returned", "measured", "kernels", "alive", "gradients", "activations")
        merged: dict[str, Any] = {
            name: {key: x for report in reports for key, x in getattr(report, name).items()}
            for name in names
        }
        return replace(
            reports[0],
            memory=max(report.memory for report in reports),
            gpus=tuple(gpu for report in reports for gpu in report.gpus),
            rates=max((report.rates for report in reports), key=len),
            **merged,
        )


_Timed = TypeVar("_Timed", Measured, Kernel)


def earlier(rows: Mapping[int, Sequence[_Timed]], seconds: float) -> dict[int, tuple[_Timed, ...]]:
    """The timings of each device, ``seconds`` earlier."""
    return {
        device: tuple(x._replace(start=x.start - seconds, end=x.end - seconds) for x in row)
        for device, row in rows.items()
    }


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a device could not do a call; its state is unchanged."""

    why: str
