"""``FitSummary``, the result of ``Trainer.fit``: what it did, and why it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter

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
    monitored: tuple[float, ...] = ()
    """The monitored number of each evaluation; empty without ``monitor``."""

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
            text += _best_and_last(self.evaluations)
            if self.monitored:
                steps = (step for step, _ in self.evaluations)
                pairs = tuple(zip(steps, self.monitored, strict=True))
                text += f", monitored {_best_and_last(pairs)}"
        if self.resumed_from is not None:
            text += f"; resumed from step {self.resumed_from}"
        return f"{text}; {self.ended.value}"


def _best_and_last(numbers: Sequence[tuple[int, float]]) -> str:
    """The lowest of some steps' numbers, the first of equal ones, and the last."""
    valid = [pair for pair in numbers if not math.isnan(pair[1])]
    text = f"last {numbers[-1][1]:.4f}"
    if valid:
        step, best = min(valid, key=itemgetter(1))
        text = f"best {best:.4f} (step {step}), {text}"
    return text
