"""``FitSummary``, the result of ``Trainer.fit``: what it did, and why it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from piper.base.units import counted, waiting_text


class Ended(Enum):
    """Why a call of ``fit`` ended."""

    STEPS = "all its steps were taken"
    BATCHES = "the batches ended"
    EPOCHS = "all its epochs are done"
    PATIENCE = "evaluations got no better"
    EARLIER = "it was done before the run was resumed"
    ASKED = "SIGTERM asked the process to end"


@dataclass(frozen=True, slots=True)
class FitSummary:
    """What one call of ``fit`` did."""

    steps: int
    """The steps of this call, without those before a resume."""
    last_step: int
    """The number of the last step, counted over the whole run."""
    epochs: int
    """The passes over the batches that have ended, also those before a resume."""
    loss: float | None
    """The loss of the last step; None without steps."""
    first_loss: float | None
    """The loss of its first step."""
    best_loss: tuple[int, float] | None
    """The step with the lowest loss, and its loss."""
    mean_loss: float | None
    """The mean of the losses of its steps."""
    evaluations: tuple[tuple[int, float], ...]
    """The steps after which held-out batches were evaluated, and their losses, also those before a
    resume."""
    best_evaluation: tuple[int, float] | None
    """The step of the best evaluation, and its loss."""
    seconds: float
    tokens_per_second: float
    """Over all its steps, without the time of evaluations."""
    resumed_from: int | None
    """The step of the checkpoint that the run was resumed from, if it was resumed in or after this
    call."""
    ended: Ended

    def __str__(self) -> str:
        text = counted(self.steps, "step")
        of = "" if self.resumed_from is None else " of the run"
        if self.epochs:
            text += f" ({counted(self.epochs, 'epoch')}{of})"
        text += f" in {waiting_text(self.seconds)}"
        if self.loss is not None:
            step, best = self.best_loss or (0, math.nan)
            text += (
                f", {self.tokens_per_second:,.0f} tokens/s, to step {self.last_step}: loss "
                f"first {self.first_loss:.4f}, best {best:.4f}{f' (step {step})' if step else ''}, "
                f"last {self.loss:.4f}, mean {self.mean_loss:.4f}"
            )
        if self.evaluations:
            text += f"; {counted(len(self.evaluations), 'evaluation')}{of}: loss "
            if self.best_evaluation is not None:
                step, best = self.best_evaluation
                text += f"best {best:.4f} (step {step}), "
            text += f"last {self.evaluations[-1][1]:.4f}"
        if self.resumed_from is not None:
            text += f"; resumed from step {self.resumed_from}"
        return f"{text}; {self.ended.value}"
