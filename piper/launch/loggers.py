"""Callbacks for ``Trainer.fit(callbacks=[...])`` that log to TensorBoard or Weights & Biases. With
every launcher, only the process of rank 0 calls them, after each step.

Reading a loss waits for its device. ``every`` is the number of steps between such reads.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from piper.base.errors import PiperError
from piper.launch.trainer.step_result import StepResult


def scalars(result: StepResult) -> dict[str, float]:
    """The scalars of a step, by the names under which they are logged."""
    logged = {
        "train/loss": float(result.loss),
        "train/tokens_per_second": result.tokens_per_second,
        "train/seconds": result.seconds,
        "train/memory_bytes": float(result.memory),
    }
    if result.grad_norm is not None:
        logged["train/grad_norm"] = float(result.grad_norm)
    for name, value in result.outputs.items():
        logged[f"train/{name}"] = float(value)
    for module, imbalance in result.expert_imbalance.items():
        logged[f"expert_imbalance/{module}"] = imbalance
    return logged


class TensorBoard:
    """Writes the scalars of every ``every``-th step to ``folder``, for ``tensorboard --logdir``."""

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        self._folder = str(folder)
        self._every = _checked(every)
        self._writer: Any = None

    def on_step(self, step: int, result: StepResult) -> None:
        if step % self._every == 0:
            if self._writer is None:  # not in __init__: other ranks construct this object too
                package = _imported("torch.utils.tensorboard", "TensorBoard", "tensorboard")
                self._writer = package.SummaryWriter(self._folder)
            for name, value in scalars(result).items():
                self._writer.add_scalar(name, value, step)

    def on_end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """Logs the scalars of every ``every``-th step to Weights & Biases. ``settings`` are arguments
    of ``wandb.init`` such as project, name, config, mode."""

    def __init__(self, *, every: int = 1, **settings: Any) -> None:
        self._settings = settings
        self._every = _checked(every)
        self._run: Any = None

    def on_step(self, step: int, result: StepResult) -> None:
        if step % self._every == 0:
            if self._run is None:
                package = _imported("wandb", "WeightsAndBiases", "wandb")
                self._run = package.init(**self._settings)
            self._run.log(scalars(result), step=step)

    def on_end(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def _checked(every: int) -> int:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise PiperError(f"every={every!r} must be a whole number from 1 on")
    return every


def _imported(module: str, what: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise PiperError(
            f"{what} needs a package that is not installed: pip install {package} ({error})"
        ) from error
