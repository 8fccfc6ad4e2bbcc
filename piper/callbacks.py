"""Callbacks of ``Trainer.fit``: loggers, and the protocol for your own."""

from piper.launch.loggers.callback import (
    Callback,
    EvaluationCallback,
    ObservingCallback,
    RegionStatistics,
    StepProfile,
    TrainerCallback,
)
from piper.launch.loggers.csv_file import CSV
from piper.launch.loggers.experiment_trackers import MLflow, TensorBoard, WeightsAndBiases
from piper.launch.loggers.logged import scalars

__all__ = [
    "CSV",
    "Callback",
    "EvaluationCallback",
    "MLflow",
    "ObservingCallback",
    "RegionStatistics",
    "StepProfile",
    "TensorBoard",
    "TrainerCallback",
    "WeightsAndBiases",
    "scalars",
]
