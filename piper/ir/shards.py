"""How regions are sharded along axes of devices, and the segments that they become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """How a value lies along an axis of tensor or context parallelism, if not replicated."""

    axis: str
    dim: int | None
    """The dimension along which it is sharded; None for a partial sum."""


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
class SortedRows:
    """Of a chunk that computes on rows sorted by expert: which input says how many rows each
    expert has. The others, and all outputs, are rows."""

    counts: int
    experts: int
    rows: int
