"""Evaluations during a run: when they are due, their losses, and when the run has lost patience."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from piper.launch.evaluation.evaluate import evaluate
from piper.launch.loggers.callback import Callback, EvaluationCallback
from piper.launch.loop.fit_options import FitOptions
from piper.launch.state.state_calls import averaged
from piper.launch.trainer.session import Session


class HeldOut:
    """The held-out batches of one call of ``fit`` or ``iterate``, and their losses so far."""

    def __init__(
        self, session: Session, options: FitOptions, callbacks: Sequence[Callback]
    ) -> None:
        self._session = session
        self._options = options
        self._callbacks = [x for x in callbacks if isinstance(x, EvaluationCallback)]
        self.improved: Callable[[], None] = lambda: None
        """Called after an evaluation that is the best so far."""
        self.show: Callable[[int, float, float | None], None] = lambda *_: None
        """Called after each evaluation with its step, its loss and the monitored number, if any."""
        self.losses: list[tuple[int, float]] = []
        """Pairs of a step and the loss after it."""
        self._scores: list[float] = []
        """For each, the monitored number, the loss if none is given."""
        self.seconds = 0.0
        """The time that evaluations have taken in this process."""

    @property
    def monitored(self) -> tuple[float, ...]:
        """The monitored number of each evaluation; empty without ``monitor``."""
        return () if self._options.monitor is None else tuple(self._scores)

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the best evaluation, the first of equal ones, and its loss."""
        return None if self._best is None else self.losses[self._best]

    @property
    def _best(self) -> int | None:
        """Which evaluation is the best."""
        valid = [i for i, score in enumerate(self._scores) if not math.isnan(score)]
        return min(valid, key=lambda i: self._scores[i], default=None)

    @property
    def impatient(self) -> bool:
        """Whether as many evaluations as ``patience`` have given nothing better."""
        if self._options.patience is None or not self.losses:
            return False
        since = len(self.losses) - (0 if self._best is None else self._best + 1)
        return since >= self._options.patience

    def after_step(self, step: int) -> None:
        """Evaluate if it is due after this step."""
        if self._options.evaluate_every is not None and step % self._options.evaluate_every == 0:
            self._evaluate(step)

    def after_epoch(self, step: int) -> None:
        """Evaluate, unless the steps say when."""
        if self._options.evaluate_every is None:
            self._evaluate(step)

    def at_end(self, step: int) -> None:
        """Evaluate, unless this step is evaluated already."""
        self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        batches = self._options.evaluate
        if batches is None or (self.losses and self.losses[-1][0] == step):
            return
        start, options = time.perf_counter(), self._options
        given = batches if isinstance(batches, Iterable) else batches()
        weights = averaged(self._session) if options.averaged else nullcontext()
        with torch.random.fork_rng([]), weights:  # a loader draws: training must not depend on it
            result = evaluate(
                self._session, (given,), pad=None, rows=options.rows, lengths=options.pad
            )
        loss, monitor = float(result.loss), options.monitor
        self.losses.append((step, loss))
        self._scores.append(loss if monitor is None else float(monitor(result)))
        self.show(step, loss, None if monitor is None else self._scores[-1])
        self.seconds += time.perf_counter() - start
        for callback in self._callbacks:
            callback.on_evaluate(step, result)
        if self._best == len(self.losses) - 1:
            self.improved()

    def state(self) -> dict[str, Any]:
        """The losses as plain values, for a checkpoint."""
        rows = zip(self.losses, self._scores, strict=True)
        return {"evaluations": [[*pair, score] for pair, score in rows]}

    def go_to(self, state: Any) -> None:
        """Continue from ``state``."""
        listed = state.get("evaluations") if isinstance(state, dict) else None
        for row in listed if isinstance(listed, list) else []:
            match row:
                case [int(step), float(loss), *scores] if all(isinstance(x, float) for x in scores):
                    self.losses.append((step, loss))
                    self._scores.append(scores[0] if scores else loss)
