"""From a model with named regions to chunks whose passes are pure functions."""

from piper.capture.chunks import Chunk, ChunkValue
from piper.capture.model import Captured, capture
from piper.capture.program import ChunkProgram, Function, Kind, Pass, Ref
from piper.capture.regions import Region, annotate
from piper.capture.saving import RematPolicy
from piper.capture.tensors import TensorSpec

__all__ = [
    "Captured",
    "Chunk",
    "ChunkProgram",
    "ChunkValue",
    "Function",
    "Kind",
    "Pass",
    "Ref",
    "Region",
    "RematPolicy",
    "TensorSpec",
    "annotate",
    "capture",
]
