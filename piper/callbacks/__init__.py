"""Callbacks of ``Trainer.fit``: TensorBoard, Weights & Biases, and the protocol for your own."""

from piper.launch.loggers import TensorBoard, WeightsAndBiases, scalars
from piper.launch.trainer.callback import Callback

__all__ = ["Callback", "TensorBoard", "WeightsAndBiases", "scalars"]
