"""Warnings that a trainer gives once, and not again at every step."""

from __future__ import annotations

import math
from enum import Enum, auto

from piper.base.errors import warn


class Notice(Enum):
    LOSS = auto()
    """A loss that is not finite."""
    OPTIMIZER = auto()
    """Steps that update nothing."""
    PADDING = auto()
    """Padded rows that count in the loss."""
    BATCHES = auto()
    """Batches that ended before the steps."""
    SAMPLER = auto()
    """A sampler that leaves out parts of the dataset."""
    WEIGHTS = auto()
    """Trained weights that nobody has read."""


class Notices:
    """Gives each warning once; none if ``silent``."""

    def __init__(self, *, silent: bool) -> None:
        self._given: set[Notice] = set(Notice) if silent else set()

    def give(self, notice: Notice, text: str) -> None:
        if notice not in self._given:
            self._given.add(notice)
            warn(text)

    def look_at(self, step: int, loss: float) -> None:
        """Warn of a loss that is not finite."""
        if not math.isfinite(loss):
            self.give(
                Notice.LOSS,
                f"the loss of step {step} is {loss}: look at its batch, at the learning rate and, "
                "in bf16, at the loss function; on_nan='stop' ends with the first step whose "
                "gradients are not finite, on_nan='skip' leaves such steps out",
            )
