"""What a logger writes of a step or an evaluation, and the base of loggers.

Only the process of rank 0 calls a logger. Reading a loss waits for its device: ``every`` is the
number of steps between such reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any

from piper.base.arguments import whole_number
from piper.base.errors import PiperError
from piper.launch.trainer.step_result import StepResult
from piper.launch.watch.progress_bar import Pace


def scalars(result: StepResult, seconds: float | None = None) -> dict[str, float]:
    """The scalars of a step or an evaluation, by the names under which they are logged.
    ``seconds`` is the measured time of the step, where ``result.seconds`` does not wait for the
    GPU."""
    kind = "evaluation" if result.evaluated else "train"
    seconds = seconds or result.seconds
    logged = {
        f"{kind}/loss": float(result.loss),
        f"{kind}/tokens_per_second": result.tokens / seconds,
        f"{kind}/seconds": seconds,
        f"{kind}/memory_bytes": result.memory,
    }
    if result.mfu is not None:
        logged[f"{kind}/mfu"] = result.mfu * result.seconds / seconds
    if result.grad_norm is not None:
        logged[f"{kind}/grad_norm"] = float(result.grad_norm)
    rates = result.learning_rates
    for number, rate in enumerate(rates):
        logged[f"{kind}/learning_rate{f'/{number}' if len(rates) > 1 else ''}"] = rate
    for name, value in result.outputs.items():
        if not value.dim():
            logged[f"{kind}/{name}"] = float(value)
    for module, imbalance in result.expert_imbalance.items():
        logged[f"expert_imbalance/{module}"] = imbalance
    for of, regions in (("gradient", result.gradients), ("activation", result.activations)):
        for region, statistics in regions.items():
            for name, number in asdict(statistics).items():
                logged[f"{of}_{name}/{region}"] = number
    if result.profile is not None:
        logged["profile/bubble"] = result.profile.bubble
        logged["profile/exposed_seconds"] = result.profile.exposed
        logged["profile/seconds"] = result.profile.seconds
    return logged


class Logger(ABC):
    """Writes the scalars of every ``every``-th step, and of each evaluation."""

    def __init__(self, every: int) -> None:
        self._every = whole_number("every", every)
        self._begun = False
        self._pace: Pace | None = None

    def on_step(self, step: int, result: StepResult) -> None:
        if step % self._every == 0:
            on_gpu = result.loss_on_host is None
            float(result.loss)  # waits for the GPU
            seconds = self._pace.since(step) if on_gpu and self._pace else None
            self._log(step, result, seconds)
            self._pace = self._pace or Pace(step)

    def on_evaluate(self, step: int, result: StepResult) -> None:
        self._log(step, result)
        self._pace = Pace(step)

    def on_end(self) -> None:
        if self._begun:
            self._begun = False
            self.end()

    def _log(self, step: int, result: StepResult, seconds: float | None = None) -> None:
        if not self._begun:  # not in __init__: other ranks construct this object too
            self.begin()
            self._begun = True
        self.write(step, scalars(result, seconds))

    @abstractmethod
    def begin(self) -> None:
        """Open what is written to."""

    @abstractmethod
    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step."""

    @abstractmethod
    def end(self) -> None:
        """Close what is written to."""


def imported(module: str, what: str, package: str) -> Any:
    """A module that only this callback needs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise PiperError(
            f"{what} needs a package that is not installed: pip install {package} ({error})"
        ) from error
