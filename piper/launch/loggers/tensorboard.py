"""Logs to TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piper.launch.loggers.logged import Logger, imported


class TensorBoard(Logger):
    """Writes the scalars of every ``every``-th step to ``folder``, for ``tensorboard --logdir``."""

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        super().__init__(every)
        self._folder = str(folder)
        self._writer: Any = None

    def begin(self) -> None:
        package = imported("torch.utils.tensorboard", "TensorBoard", "tensorboard")
        self._writer = package.SummaryWriter(self._folder)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        self._writer.close()
