"""Logs to MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.launch.loggers.logged import Logger, imported


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
