"""Training settings: optimizer, scheduler, gradient clipping, non-finite gradients, seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from piper.base.errors import PiperError
from piper.base.modes import Precision
from piper.base.units import class_text
from piper.state.optimizer.factory import OptimizerFactory
from piper.state.optimizer.scheduler import SchedulerFactory

ON_NAN = ("skip", "stop")


@dataclass(frozen=True, slots=True)
class Training:
    """The user's training settings besides model, loss and strategy."""

    optimizer: OptimizerFactory | None
    scheduler: SchedulerFactory | None
    clip_norm: float | None
    precision: str
    seed: int
    on_nan: str | None = None
    """What to do in a step with non-finite gradients. None: update anyway. "skip": do not update,
    and continue. "stop": do not update, and raise."""
    default_dtype: torch.dtype = torch.float32
    """``torch.get_default_dtype()`` at capture. Operations without an explicit dtype depend on
    it."""

    def check(self) -> None:
        if self.optimizer is not None and not callable(self.optimizer):
            raise PiperError(
                f"optimizer= is {class_text(self.optimizer)}: it must be a function from a "
                "list of parameters to an optimizer, such as "
                "lambda params: torch.optim.AdamW(params, lr=3e-4)"
            )
        if self.scheduler is not None and not callable(self.scheduler):
            raise PiperError(
                f"scheduler= is {class_text(self.scheduler)}: it must be a function from an "
                "optimizer to a learning-rate scheduler, such as "
                "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)"
            )
        clip = self.clip_norm
        number = isinstance(clip, int | float) and not isinstance(clip, bool)
        if clip is not None and not (number and clip > 0):
            raise PiperError(f"clip_norm={clip!r} must be a positive number, or None")
        if self.on_nan not in (None, *ON_NAN):
            raise PiperError(f"on_nan={self.on_nan!r} must be 'skip' or 'stop', or None")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise PiperError(f"seed={self.seed!r} must be a whole number")

    @property
    def waits_for_norm(self) -> bool:
        """Whether every update waits for the global gradient norm."""
        return self.clip_norm is not None or self.on_nan is not None

    @property
    def master(self) -> torch.dtype | None:
        """The dtype of the master weights; None if the step computes with the weights directly."""
        return torch.float32 if self.precision == Precision.BF16.value else None
