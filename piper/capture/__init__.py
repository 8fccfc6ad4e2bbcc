"""From a model with named regions to chunks whose passes are pure functions."""

from piper.capture.chunks import Chunk, Value
from piper.capture.model import Captured, capture
from piper.capture.program import Function, Kind, Pass, Program, Ref
from piper.capture.regions import Region, annotate
from piper.capture.saving import Remat
from piper.capture.tensors import TensorSpec

__all__ = [
    "Captured",
    "Chunk",
    "Function",
    "Kind",
    "Pass",
    "Program",
    "Ref",
    "Region",
    "Remat",
    "TensorSpec",
    "Value",
    "annotate",
    "capture",
]
