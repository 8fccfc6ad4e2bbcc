"""The losses of a run, read without waiting for the device.

A loss and the norm of its gradients on a GPU are copied to the host after the next step has been
submitted, and read once the copy is done. Those on the host are read at once.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.launch.trainer.notices import Notices
from piper.launch.trainer.step_result import StepResult
from piper.launch.watch.progress_bar import Display


@dataclass(frozen=True, slots=True)
class _Copy:
    """The numbers of a step on their way to the host."""

    step: int
    result: StepResult
    loss: Tensor
    norm: Tensor | None
    event: torch.cuda.Event | None


class Losses:
    """The first, last and lowest loss, the mean, and a warning if one is not finite."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self.display = Display()
        """Shows each step once its loss is read, and evaluations."""
        self._next: tuple[int, StepResult] | None = None
        self._copies: deque[_Copy] = deque()
        self._count = 0
        self._sum = 0.0
        self.first: float | None = None
        self.last: float | None = None
        self.best: tuple[int, float] | None = None
        """The step with the lowest loss, and its loss."""

    def add(self, step: int, result: StepResult) -> None:
        """Read the losses that have arrived; one on a GPU is copied after the next step."""
        self._copy()
        self._next = step, result
        if result.loss_on_host is not None:
            self._copy()
        while self._copies and ((event := self._copies[0].event) is None or event.query()):
            self._look()

    def finish(self) -> None:
        """Read all losses; waits for the device."""
        self._copy()
        while self._copies:
            self._look()

    def evaluated(self, step: int, loss: float, monitored: float | None) -> None:
        """Show an evaluation, after the steps before it."""
        self.finish()
        self.display.evaluated(step, loss, monitored)

    @property
    def mean(self) -> float | None:
        """The mean of the losses read so far."""
        return self._sum / self._count if self._count else None

    def _copy(self) -> None:
        """Start copying the loss of the previous step."""
        if self._next is None:
            return
        (step, result), self._next = self._next, None
        loss, norm = result.loss.detach(), result.grad_norm
        copied = loss.to("cpu", non_blocking=True)
        norm = None if norm is None else norm.detach().to("cpu", non_blocking=True)
        event = None
        if loss.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(loss.device))
        self._copies.append(_Copy(step, result, copied, norm, event))

    def _look(self) -> None:
        copy = self._copies.popleft()
        if copy.event is not None:
            copy.event.synchronize()
        step, loss = copy.step, float(copy.loss)
        self._count += 1
        self._sum += loss
        self.last = loss
        self.first = loss if self.first is None else self.first
        if not math.isnan(loss) and (self.best is None or loss < self.best[1]):
            self.best = step, loss
        self._notices.look_at(step, loss)
        self.display.show(step, loss, None if copy.norm is None else float(copy.norm), copy.result)
