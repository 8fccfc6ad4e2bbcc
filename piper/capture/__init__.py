"""From a model with named regions to chunks whose passes are pure functions."""

from piper.capture.chunk.chunks import Chunk, ChunkValue
from piper.capture.model import Captured, capture
from piper.capture.code.chunk_program import ChunkProgram, Function, Kind, Pass, Ref
from piper.capture.regions import Region, annotate
from piper.capture.chunk.remat_choice import RematPolicy
from piper.ir.tensors import TensorSpec

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
