"""Logs to TensorBoard, MLflow and Weights & Biases, whose packages are imported when they are
used."""

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


class MLflow(Logger):
    """Logs the scalars of every ``every``-th step to MLflow. ``settings`` are arguments of
    ``mlflow.start_run`` such as run_name, run_id, tags; the tracking server and the experiment are
    those that are set in mlflow."""

    def __init__(self, *, every: int = 1, **settings: Any) -> None:
        super().__init__(every)
        self._settings = settings
        self._package: Any = None

    def begin(self) -> None:
        self._package = imported("mlflow", "MLflow", "mlflow")
        self._package.start_run(**self._settings)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._package.log_metrics(dict(scalars), step=step)

    def end(self) -> None:
        self._package.end_run()


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
