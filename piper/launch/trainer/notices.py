"""Warnings that a trainer gives once, and not again at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

from piper.base.errors import warn


class Notice(Enum):
    RATE = auto()
    """Learning rates of zero."""
    LOSS = auto()
    """A loss that is not finite."""
    EVALUATION = auto()
    """An evaluation whose loss is not a number."""
    MODEL = auto()
    """A model that changed, but not in the trainer."""
    OPTIMIZER = auto()
    """Steps that update nothing."""
    PADDING = auto()
    """Padded rows that count in the loss."""
    BATCHES = auto()
    """Batches that ended before the steps."""
    LAST = auto()
    """A last batch that will probably be refused."""
    SAMPLER = auto()
    """A sampler that leaves out parts of the dataset."""
    WEIGHTS = auto()
    """Trained weights that nobody has read."""


class Notices:
    """Gives each warning once; none if ``silent``."""

    def __init__(self, *, silent: bool) -> None:
        self._given: set[Notice] = set(Notice) if silent else set()
        self._still = 0
        """Steps in a row with a learning rate of zero."""

    def give(self, notice: Notice, text: str) -> None:
        if notice not in self._given:
            self._given.add(notice)
            warn(text)

    def look_at_rates(self, step: int, rates: Sequence[float]) -> None:
        """Warn of two steps in a row that change no parameter; warm-up may begin with one."""
        self._still = 0 if any(rates) or not rates else self._still + 1
        if self._still == 2:
            self.give(
                Notice.RATE,
                f"the learning rate of steps {step - 1} and {step} is 0: they train nothing. Look "
                "at optimizer= and scheduler=; a scheduler counts steps, over all epochs, and one "
                "that ends at 0 must be made for as many steps as there are",
            )

    def look_at(self, step: int, loss: float) -> None:
        """Warn of a loss that is not finite."""
        if not math.isfinite(loss):
            self.give(
                Notice.LOSS,
                f"the loss of step {step} is {loss}: look at its batch (does any target count?), "
                "at the learning rate and, in bf16, at the loss function; on_nan='stop' ends with "
                "the first step whose gradients are not finite, on_nan='skip' leaves such steps "
                "out",
            )
