"""Piper: distributed training of PyTorch models from named regions and a few directives."""

from piper import strategies
from piper.capture.regions import annotate
from piper.compiler import compile
from piper.directives import order, partition, place, remat, replicate, shard, split, stream
from piper.errors import CaptureError, DirectiveError, PiperError
from piper.launch import Trainer, launch
from piper.lower.memory import Holder, Memory
from piper.lower.schedule import Costs
from piper.lower.traffic import Traffic
from piper.program import Program
from piper.strategy import Strategy
from piper.weights import Source

__all__ = [
    "CaptureError",
    "Costs",
    "DirectiveError",
    "Holder",
    "Memory",
    "PiperError",
    "Program",
    "Source",
    "Strategy",
    "Traffic",
    "Trainer",
    "annotate",
    "compile",
    "launch",
    "order",
    "partition",
    "place",
    "remat",
    "replicate",
    "shard",
    "split",
    "strategies",
    "stream",
]
