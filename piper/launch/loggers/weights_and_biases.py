"""Logs to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.launch.loggers.logged import Logger, imported


class WeightsAndBiases(Logger):
    """Logs the scalars of every ``every``-th step to Weights & Biases. ``settings`` are arguments
    of ``wandb.init`` such as project, name, config, mode."""

    def __init__(self, *, every: int = 1, **settings: Any) -> None:
        super().__init__(every)
        self._settings = settings
        self._run: Any = None

    def begin(self) -> None:
        self._run = imported("wandb", "WeightsAndBiases", "wandb").init(**self._settings)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(scalars, step=step)

    def end(self) -> None:
        self._run.finish()
