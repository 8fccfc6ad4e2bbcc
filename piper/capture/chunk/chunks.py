"""What a cut model consists of: chunks, the values between them, and a body for each chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from piper.capture.regions import Region
from piper.ir.tensors import TensorSpec
from piper.base.errors import CaptureError


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """How a value lies along an axis of tensor or context parallelism, if not replicated."""

    axis: str
    dim: int | None
    """The dimension along which it is sharded; None for a partial sum."""


@dataclass(frozen=True, slots=True)
class ChunkValue:
    """A tensor of one microbatch that a chunk takes: a batch input, or what a chunk made."""

    index: int
    name: str
    spec: TensorSpec
    producer: int | None
    """The chunk that makes it; None for a tensor of the batch."""
    placements: tuple[AxisPlacement, ...] = ()
    """Along the axes where it is not replicated."""


@dataclass(frozen=True, slots=True)
class Body:
    """A chunk's forward as a function ``(*parameters, *buffers, *inputs) -> (*outputs, *updates)``.

    Chunks whose bodies have equal ``key`` do the same on different tensors.
    """

    module: fx.GraphModule
    parameters: int
    buffers: int
    inputs: int
    outputs: int
    updates: int
    key: str

    def fakes(self) -> list[FakeTensor]:
        """The fake tensors that the body was traced with, one for each argument."""
        return [node.meta["val"] for node in self.module.graph.find_nodes(op="placeholder")]


class Move(Enum):
    """What brings a value, or its gradient, from one layout along an axis into another. What is
    gathered, scattered or selected lies in a first dimension of its own, of the axis' size."""

    NOTHING = "nothing"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SELECT = "select"
    """Each takes its own part of what all have."""

    __hash__ = object.__hash__  # Enum's own is slow


@dataclass(frozen=True, slots=True)
class Redistribution:
    """From one layout to another in the forward, and back in the backward."""

    forward: Move
    backward: Move
    text: str
    """For instance P(sum) -> R."""


class ContextAttention(Enum):
    """How a sequence that is sharded attends to all of itself."""

    ALL_TO_ALL = "all_to_all"
    """Each device has whole sequences for some of the heads (Ulysses)."""
    ALL_GATHER = "all_gather"
    """Each device has all keys and values for its queries, which are the head and the tail of the
    sequence: under a causal mask all have the same work."""

    __hash__ = object.__hash__


class Style(Enum):
    """How the weight of a product is sharded."""

    COLUMN = "column"
    """Along what the product makes."""
    ROW = "row"
    """Along what it sums over."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """How a parameter is sharded: along ``dim``, each of ``sections`` (a fused weight has several)
    for itself."""

    dim: int
    sections: tuple[int, ...] = ()


RANK = "piper.rank."
"""How the name of a buffer begins that has a device's place along an axis, which follows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a chunk under tensor parallelism: what lies between two redistributions, or one
    of these."""

    number: int
    axis: str
    ways: int
    sharded: bool = False
    """Whether devices along the axis compute on different shards; otherwise they all compute the
    same. If so, gradients of parameters that are not sharded are partial sums."""
    parameters: Mapping[str, ParameterShard] = field(default_factory=dict)
    redistribution: Redistribution | None = None
    """What it is, if it is no computation."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """An operation that reads its inputs gathered, since no rule says how to shard it."""

    operation: str
    nbytes: int
    """Sent by each device for a microbatch, forward and backward."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A dropout of the whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    probability: float


@dataclass(frozen=True, slots=True)
class Draws:
    """Where a segment is in the random numbers that its whole chunk draws one after another."""

    chunk: int
    before: tuple[Draw, ...] = ()
    """What other segments draw before it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A maximal run of ops with one stack of regions, and what its body's arguments are."""

    index: int
    tags: tuple[Region, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    updates: tuple[str, ...]
    body: Body
    segments: tuple[Segment, ...] = ()
    """Which part of a region it is under tensor and context parallelism, one for each axis."""
    draws: Draws | None = None
    """Of a segment that draws random numbers."""
    gathered: tuple[Gathered, ...] = ()

    @property
    def name(self) -> str:
        return "/".join(map(str, self.tags)) or "model"


@dataclass(frozen=True, slots=True)
class Cut:
    """The chunks in an order that respects every edge, and the values between them."""

    chunks: tuple[Chunk, ...]
    values: tuple[ChunkValue, ...]
    loss: int
    count: int | None
    outputs: tuple[int, ...]
    updates: frozenset[str]
    """The buffers that some chunk gives a new content."""


def refuse_empty(cut: Cut, regions: Mapping[Region, str], loss_region: Region) -> None:
    """A region that no chunk is in would never match a filter: say so now."""
    held = {region for chunk in cut.chunks for region in chunk.tags}
    for region, where in regions.items():
        if region not in held and region != loss_region:
            raise CaptureError(
                f"region {region} is empty ({where}): it holds no operation on the batch or on "
                "parameters whose result is used; remove it, or put the operations inside"
            )
