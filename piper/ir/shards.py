"""How regions are sharded along device axes, and the segments that this makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from piper.ir.collectives import Move


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """The placement of a value along a tensor or context parallel axis, if not replicated."""

    axis: str
    dim: int | None
    """The dimension along which it is sharded; None for a partial sum."""


@dataclass(frozen=True, slots=True)
class Redistribution:
    """From one layout to another in the forward, and back in the backward."""

    forward: Move
    backward: Move
    text: str
    """For example P(sum) -> R."""


class ContextAttention(Enum):
    """How attention works on a sharded sequence."""

    ALL_TO_ALL = "all_to_all"
    """Each device attends over whole sequences for some of the heads (Ulysses)."""
    ALL_GATHER = "all_gather"
    """Each device gathers all keys and values for its queries. It has one block from the head and
    one from the tail of the sequence, so a causal mask gives all devices the same work."""

    __hash__ = object.__hash__


class Style(Enum):
    """How the weight of a matrix product is sharded."""

    COLUMN = "column"
    """Along the output dimension."""
    ROW = "row"
    """Along the summed dimension."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """How a parameter is sharded: along ``dim``, each of ``sections`` separately (a fused weight
    has several)."""

    dim: int
    sections: tuple[int, ...] = ()


RANK = "piper.rank."
"""Name prefix of a buffer that holds a device's rank along an axis; the axis name follows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a chunk under tensor parallelism: a redistribution, or the computation between
    two."""

    number: int
    axis: str
    ways: int
    sharded: bool = False
    """Whether devices along the axis compute on different shards. Then gradients of unsharded
    parameters are partial sums. Otherwise all devices compute the same."""
    parameters: Mapping[str, ParameterShard] = field(default_factory=dict)
    redistribution: Redistribution | None = None
    """None for a computation."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """An operation that reads gathered inputs because no rule shards it."""

    operation: str
    nbytes: int
    """Bytes that each device sends per microbatch, forward and backward."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A dropout on the unsharded tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    probability: float


@dataclass(frozen=True, slots=True)
class Draws:
    """A segment's position in the sequence of random draws of its whole chunk."""

    chunk: int
    before: tuple[Draw, ...] = ()
    """The draws of earlier segments."""


@dataclass(frozen=True, slots=True)
class SortedRows:
    """For a chunk that computes on rows sorted by expert: ``counts`` is the input that holds the
    number of rows of each expert. All other inputs and all outputs are rows."""

    counts: int
    experts: int
    rows: int
