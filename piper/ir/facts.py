"""What the compiler knows of a model: its chunks, the values between them, its parameters.

No tensor and no graph: sizes, costs and who reads what. ``facts_of`` reads them off a captured
model; a test may write them down by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper.capture.program import Kind, Pass, Ref
from piper.capture.saving import Remat

_BUNDLED = (Kind.SAVED, Kind.HANDOFF, Kind.PARAMETER_GRAD)
_STATE = (Kind.PARAMETER, Kind.BUFFER)


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What one pass of a chunk reads, makes and costs.

    Saved tensors, handed-off tensors and gradients of parameters count as one bundle each, with
    index 0; parameters and buffers are state and are not listed.
    """

    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    flops: int
    uses_parameters: bool


@dataclass(frozen=True, slots=True)
class Variant:
    """A chunk's passes under one policy of recomputing."""

    passes: Mapping[Pass, PassFacts]
    saved_bytes: int
    handoff_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """One chunk: its regions, its parameters, and its inputs and outputs as numbers of values."""

    index: int
    tags: Mapping[str, int]
    parameters: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    variants: Mapping[Remat, Variant]


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """A tensor between chunks, as one device holds it for one microbatch."""

    name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """A parameter as the model has it, not divided."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    trained: bool


@dataclass(frozen=True, slots=True)
class Model:
    """Chunks in an order that respects every edge; values by number; parameters by name."""

    chunks: tuple[ChunkFacts, ...]
    values: tuple[ValueFacts, ...]
    parameters: Mapping[str, ParameterFacts]
    loss: int
    default_remat: Remat
