"""What the compiler knows about a model: its chunks, the values between them, its parameters.

Sizes, costs, reads and writes only: no tensors and no graphs. ``piper.capture.captured_facts``
derives them from a captured model; tests may write them by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from piper.base.codec import ArrayRecord, Count
from piper.ir.passes import Pass, Ref, RematPolicy
from piper.ir.shards import AxisPlacement, Gathered, Segment, SortedRows
from piper.ir.tensors import TensorSpec

LOSS_PREFIX = "loss:"
"""The start of the names of the loss's own tensors, which no path in a model has."""


class OpCost(ArrayRecord, frozen=True):
    """Equal operations of a pass, each a kernel of its own."""

    count: Count
    flops: Count = 0
    """FLOPs of each. An operation that has none may be fused with its neighbours."""
    nbytes: Count = 0
    """Bytes that each reads and writes."""
    product: tuple[Count, ...] = ()
    """(m, n, k) of a matrix product of [m, k] and [k, n]; m has the rows of all its batches or
    groups. Empty for other operations."""
    skipped: Count = 0
    """Those of ``flops`` that causal attention does not compute."""


class PassCost(ArrayRecord, frozen=True):
    """All operations of a pass but views."""

    each: tuple[OpCost, ...] = ()
    ends: Count = 0
    """Bytes of its arguments and results."""

    @property
    def flops(self) -> int:
        return sum(kernel.count * kernel.flops for kernel in self.each)

    @property
    def fused(self) -> tuple[OpCost, ...]:
        """The kernels that remain if a compiler fuses all operations without FLOPs: one between
        two others, which together read and write the arguments and results."""
        products = tuple(kernel for kernel in self.each if kernel.flops)
        if len(products) == len(self.each):
            return products
        gaps = 1 + sum(kernel.count for kernel in products)
        return (*products, OpCost(gaps, 0, self.ends // gaps))


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What one pass of a chunk reads, writes and costs.

    The tensors of one kind in ``BUNDLES`` (SAVED, SAVED_FOR_BW, BI_SAVED, PARAMETER_GRAD) are one
    reference with index 0. Parameters and buffers are state and are not listed.
    """

    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    cost: PassCost
    uses_parameters: bool
    workspace: int = 0
    """Temporary bytes, beside its reads and writes."""
    last: tuple[Ref, ...] = ()
    """Its reads that no later pass of the chunk reads."""
    eased: int = 0
    """Bytes of the workspace that it saves if nothing else uses ``last``: each of these is freed
    during the pass, right after its last use."""
    housed: int = 0
    """Additional bytes if its parameter gradients are allocated before it runs, so that later
    gradients can be added to them."""
    private: tuple[Ref, ...] = ()
    """Results that share memory with no argument and no other result."""

    @property
    def flops(self) -> int:
        return self.cost.flops


@dataclass(frozen=True, slots=True)
class Variant:
    """A chunk's passes under one rematerialization policy."""

    passes: Mapping[Pass, PassFacts]
    saved_bytes: int
    """For B or BI."""
    saved_for_bw_bytes: int
    """For B or BW."""
    bi_saved_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """One chunk: its tags, its parameters, and its inputs and outputs as value numbers."""

    index: int
    tags: Mapping[str, int]
    parameters: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    variants: Mapping[RematPolicy, Variant]
    """For each policy that a strategy can choose."""
    changes: tuple[str, ...] = ()
    """Buffers that its forward updates."""
    buffers: tuple[str, ...] = ()
    """Buffers that its forward reads."""
    random: bool = False
    """Whether its forward draws random numbers."""
    detached: tuple[str, ...] = ()
    """Parameters that it reads but makes no gradient for; other chunks may."""
    gradients: tuple[tuple[Ref, Stored], ...] = ()
    """The storage of its input gradients, where it differs from the value's storage."""
    segments: tuple[Segment, ...] = ()
    """Its segments under tensor and context parallelism, one per axis."""
    sorted_rows: SortedRows | None = None
    """Set for experts whose rows are sorted by expert."""
    products: tuple[str, ...] = ()
    """Its matrix products and attentions, with their modules and source lines."""
    gathered: tuple[Gathered, ...] = ()
    """Operations that read gathered inputs because no rule shards them."""

    @property
    def moving(self) -> Segment | None:
        """The segment that is a redistribution, if there is one."""
        return next((s for s in self.segments if s.redistribution is not None), None)


@dataclass(frozen=True, slots=True)
class Stored:
    """The storage of a tensor."""

    nbytes: int
    """Bytes of its storage: an expanded dimension takes none."""
    copied: int | None = None
    """Bytes of the contiguous copy that messages carry; None if the tensor is contiguous."""

    @staticmethod
    def of(spec: TensorSpec) -> Stored:
        return Stored(spec.nbytes, spec.copied)

    @property
    def sent(self) -> int:
        """Bytes of the tensor in a message."""
        return self.nbytes if self.copied is None else self.copied

    @property
    def dense(self) -> Stored:
        """The storage of a sum whose first term has this storage: the same if there are no gaps
        and no expanded dimensions, otherwise contiguous."""
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
    """The dimension of the batch rows, if any."""
    order: int | None = None
    """The chunk that reordered its rows; None if they are in batch order. A group that shards the
    rows differently from that chunk can only run computations that treat each row on its own."""
    placements: tuple[AxisPlacement, ...] = ()
    """Along the axes of tensor and context parallelism on which it is not replicated."""

    @property
    def stored(self) -> Stored:
        return Stored(self.nbytes, self.copied)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """A whole (unsharded) parameter of the model."""

    shape: tuple[int, ...]
    nbytes: int
    trained: bool
    dtype: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32
    """The dtype of gradient sums. Where it differs from ``dtype``, the optimizer updates a master
    copy of this dtype, and the parameter is a copy of that."""


@dataclass(frozen=True, slots=True)
class Model:
    """Chunks in topological order; values by number; parameters by name."""

    chunks: tuple[ChunkFacts, ...]
    values: tuple[ValueFacts, ...]
    parameters: Mapping[str, ParameterFacts]
    loss: int
    batch: int
    """The size of the whole batch."""
    remat: RematPolicy
    """The policy of chunks without a ``remat`` directive."""
    count: int | None = None
    """The value that the sum of losses is divided by, if the loss returns one."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """Bytes of buffers and constants, by name."""
    outputs: tuple[int, ...] = ()
    """The values reported beside the loss: scalars as their mean, other values as their rows."""
    declared: Mapping[str, str] = field(default_factory=dict)
    """The model's own tensor parallel plan: how to shard modules, by module name pattern."""
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The number of regions in each stage, by the tag of the stages, where it is decided before: by
    the uncut regions for segments, by training for evaluation."""
    flops: int = 0
    """Operations of a whole step without recomputation, however it is sharded."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a model in one mode, training or evaluation."""

    whole: Model
    """The unsharded model, to which a strategy is applied."""
    models: Mapping[int, Model]
    """The model under the strategy, by group size, with the shapes of that size. Where experts are
    sharded, costs are those of one shard."""
