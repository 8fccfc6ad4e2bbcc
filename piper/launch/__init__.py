"""Starts the devices of a compiled program and gives a trainer that drives them."""

from piper.launch.launch import launch
from piper.launch.trainer.step_result import StepResult
from piper.launch.trainer.fit_summary import FitSummary
from piper.launch.trainer.trainer import Trainer

__all__ = ["FitSummary", "StepResult", "Trainer", "launch"]
