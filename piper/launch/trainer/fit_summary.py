"""``FitSummary``, the result of ``Trainer.fit``: what it did, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from piper.base.units import counted, seconds_text


class Ended(Enum):
    """Why a call of ``fit`` ended."""

    STEPS = "all its steps were taken"
    BATCHES = "the batches ended"
    EARLIER = "it was done before the run was resumed"
    ASKED = "SIGTERM asked the process to end"


@dataclass(frozen=True, slots=True)
class FitSummary:
    """What one call of ``fit`` did."""

    steps: int
    """The steps of this call, without those before a resume."""
    last_step: int
    """The number of the last step, counted over the whole run."""
    loss: float | None
    """The loss of the last step; None without steps."""
    mean_loss: float | None
    """The mean of the losses of its steps."""
    seconds: float
    resumed_from: int | None
    """The step of the checkpoint that the run was resumed from, if it was resumed in or after this
    call."""
    ended: Ended

    def __str__(self) -> str:
        text = f"{counted(self.steps, 'step')} in {seconds_text(self.seconds)}"
        if self.loss is not None:
            text += f", to step {self.last_step}: loss {self.loss:.4f}, mean {self.mean_loss:.4f}"
        if self.resumed_from is not None:
            text += f"; resumed from step {self.resumed_from}"
        return f"{text}; {self.ended.value}"
