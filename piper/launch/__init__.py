"""Starts the devices of a compiled program and gives a trainer that drives them."""

from piper.launch.launch import launch
from piper.launch.trainer import StepResult, Trainer

__all__ = ["StepResult", "Trainer", "launch"]
