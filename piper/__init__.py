"""Piper: distributed training of PyTorch models from named regions and a few directives."""

from piper.capture.regions import annotate
from piper.directives import order, partition, place, remat, replicate, shard, split, stream
from piper.errors import CaptureError, DirectiveError, PiperError
from piper.strategy import Strategy

__all__ = [
    "CaptureError",
    "DirectiveError",
    "PiperError",
    "Strategy",
    "annotate",
    "order",
    "partition",
    "place",
    "remat",
    "replicate",
    "shard",
    "split",
    "stream",
]
