"""What the compiler knows of a model: its chunks, the values between them, its parameters.

No tensor and no graph: sizes, costs and who reads what. ``facts_of`` reads them off a captured
model; a test may write them down by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from piper.base.codec import ADDED
from piper.ir.passes import Pass, Ref, RematPolicy
from piper.ir.shards import AxisPlacement, Gathered, Segment, SortedRows
from piper.ir.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What one pass of a chunk reads, makes and costs.

    Saved, kept and handed-off tensors and gradients of parameters count as one bundle each, with
    index 0; parameters and buffers are state and are not listed.
    """

    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    flops: int
    uses_parameters: bool
    workspace: int = 0
    """Bytes it needs for a while beside what it reads and makes."""
    last: tuple[Ref, ...] = ()
    """What it reads that no later pass of the chunk does."""
    eased: int = 0
    """Bytes of the workspace that it does not need where nobody else needs those either, and they
    are let go as soon as they are used."""
    moved: int = 0
    """Bytes that its operations read and write, each by itself."""
    moved_fused: int = 0
    """The same if all but matrix products and the like are fused."""
    housed: int = 0
    """Bytes more that it needs where the memory of its parameters' gradients is there before it
    runs, so that others can be added to them later."""
    private: tuple[Ref, ...] = field(default=(), metadata=ADDED)
    """Results that share memory with no argument and no other result."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A chunk's passes under one policy of recomputing."""

    passes: Mapping[Pass, PassFacts]
    saved_bytes: int
    """For B or BI."""
    saved_for_bw_bytes: int
    """For B or BW."""
    bi_saved_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """One chunk: its regions, its parameters, and its inputs and outputs as numbers of values."""

    index: int
    tags: Mapping[str, int]
    parameters: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    variants: Mapping[RematPolicy, Variant]
    """Under each policy that a strategy can choose."""
    changes: tuple[str, ...] = ()
    """Buffers that its forward gives a new content."""
    buffers: tuple[str, ...] = ()
    """Buffers that its forward reads."""
    random: bool = False
    """Whether its forward draws random numbers."""
    detached: tuple[str, ...] = ()
    """Parameters that it reads but makes no gradient of, though other chunks may."""
    gradients: Mapping[Ref, Stored] = field(default_factory=dict)
    """How the gradients of its inputs lie that it makes; those that are not here lie as the value
    does."""
    segments: tuple[Segment, ...] = ()
    """Which part of a region it is under tensor and context parallelism, one for each axis."""
    sorted_rows: SortedRows | None = None
    """Of experts whose rows are sorted by expert, how."""
    products: tuple[str, ...] = field(default=(), metadata=ADDED)
    """Its matrix products and attentions, with their modules and lines."""
    gathered: tuple[Gathered, ...] = field(default=(), metadata=ADDED)
    """Operations that read their inputs gathered, since no rule says how to shard them."""

    @property
    def moving(self) -> Segment | None:
        """The segment that is a redistribution, if it is one."""
        return next((s for s in self.segments if s.redistribution is not None), None)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor lies in memory."""

    nbytes: int
    """Bytes of its storage: an expanded dimension takes none."""
    copied: int | None = None
    """Bytes of the contiguous copy that is sent in its place; None if it is sent as it is."""

    @staticmethod
    def of(spec: TensorSpec) -> Stored:
        return Stored(spec.nbytes, spec.copied)

    @property
    def sent(self) -> int:
        """Bytes of a message with it."""
        return self.nbytes if self.copied is None else self.copied

    @property
    def dense(self) -> Stored:
        """How a sum lies whose first term lies so: the same if that has neither gaps nor expanded
        dimensions."""
        return self if self.nbytes == self.sent else Stored(self.sent)


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """A tensor between chunks, as one device holds it for one microbatch."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    copied: int | None = None
    """As in ``Stored``."""
    rows: int | None = None
    """The dimension that has the rows of the batch, if any."""
    order: int | None = None
    """The chunk that put its rows into an order of its own; None if they lie one after another, as
    in the batch. Devices that shard rows otherwise than that chunk does can only compute each by
    itself."""
    placements: tuple[AxisPlacement, ...] = ()
    """Along the axes of tensor and context parallelism where it is not replicated."""

    @property
    def stored(self) -> Stored:
        return Stored(self.nbytes, self.copied)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """A parameter as the model has it, not divided."""

    shape: tuple[int, ...]
    nbytes: int
    trained: bool
    dtype: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32
    """What its gradients are summed in, and, where it is not ``dtype``, what is updated: the
    parameter itself is then a copy."""


@dataclass(frozen=True, slots=True)
class Model:
    """Chunks in an order that respects every edge; values by number; parameters by name."""

    chunks: tuple[ChunkFacts, ...]
    values: tuple[ValueFacts, ...]
    parameters: Mapping[str, ParameterFacts]
    loss: int
    batch: int
    """The size of the whole batch."""
    remat: RematPolicy
    """The policy of chunks that no directive speaks of."""
    count: int | None = None
    """The value that the sum of losses is divided by, if the loss gives one."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """Bytes of buffers and constants, by name."""
    outputs: tuple[int, ...] = ()
    """The values that are reported beside the loss: the mean of single numbers, and the rows of
    others."""
    declared: Mapping[str, str] = field(default_factory=dict)
    """How the model itself says that its modules can be sharded, by pattern of their names."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known of a model in one mode, training or evaluation."""

    whole: Model
    """What a strategy is applied to: no region is divided yet."""
    models: Mapping[int, Model]
    """Under the strategy, at the shapes of each size of group: of a region whose experts it
    divides, the costs are those of a share."""
