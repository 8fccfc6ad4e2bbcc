"""Callbacks of ``Trainer.fit``: loggers, and the protocol for your own."""

from piper.launch.loggers.callback import (
    Callback,
    EvaluationCallback,
    ObservingCallback,
    TrainerCallback,
)
from piper.launch.loggers.csv_file import CSV
from piper.launch.loggers.logged import scalars
from piper.launch.loggers.ml_flow import MLflow
from piper.launch.loggers.observed_steps import RegionStatistics, StepProfile
from piper.launch.loggers.tensorboard import TensorBoard
from piper.launch.loggers.weights_and_biases import WeightsAndBiases

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
