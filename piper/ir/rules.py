"""What directives say of state, experts, shards and streams: lowering does it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from piper.ir.mesh import Mesh
from piper.ir.ops import Group
from piper.ir.shards import ContextAttention, Style


@dataclass(frozen=True, slots=True)
class SendRule:
    """On which stream a group sends what other groups read."""

    stream: str
    made_by: int


P2P = SendRule("p2p", 0)
"""What is sent where no directive says how."""


@dataclass(frozen=True, slots=True)
class StateRule:
    """How parameters that several devices hold are kept equal."""

    zero: int
    bucket_bytes: int
    reduce_stream: str
    gather_stream: str
    made_by: int
    within: int | None = None
    """Over how many devices one copy of the state is divided; None for as many as can be."""


@dataclass(frozen=True, slots=True)
class ShardRule:
    """How the experts of a chunk are divided over its group."""

    ways: int
    dim: int
    stream: str
    made_by: int
    stride: int = 1
    """How far apart in the group those are that divide the experts among them."""
    sections: tuple[int, ...] = ()
    """Sizes along ``dim`` that are sharded each for itself, as in a fused weight."""
    axis: str = "ep"
    capacity: float | None = None
    """Of rows sorted by expert, room for how many times a device's own; None for all."""

    def room(self, rows: int) -> int:
        """Into how many rows a device receives, if each has ``rows`` of its own."""
        most = rows * self.ways
        if self.capacity is None:
            return most
        wanted = math.ceil(rows * self.capacity)
        return min(most, self.ways * math.ceil(wanted / self.ways))

    def part(self, rank: int) -> int:
        """Which shard of the experts the member ``rank`` of a group has."""
        return rank // self.stride % self.ways

    def mesh(self, group: Group) -> Mesh:
        """``group`` with the axis ``ep``, along which the experts are sharded."""
        outer = len(group) // (self.ways * self.stride)
        return Mesh(group, outer=outer, ep=self.ways, inner=self.stride)


@dataclass(frozen=True, slots=True)
class TensorRule:
    """How a chunk is sharded along an axis whose devices have the same rows."""

    axis: str
    ways: int
    stride: int
    """How far apart in the group neighbours along the axis are."""
    stream: str
    made_by: int
    parameters: Mapping[str, int | Style]
    """The dimension along which each is sharded, or how; the others are replicated."""
    sequence: int | None = None
    """The dimension along which activations are sharded that would be replicated."""
    split: int | None = None
    """The dimension along which the tensors of the batch are sharded: the sequence."""
    context: ContextAttention | None = None
    """How a sequence that is sharded attends to all of itself."""


def shard_numel(shape: Sequence[int], dim: int, ways: int) -> int:
    """Numbers in each of ``ways`` shards along ``dim``; those of an uneven dimension are padded."""
    if ways == 1:
        return math.prod(shape)
    return math.prod(shape) // shape[dim] * -(-shape[dim] // ways)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are reduced, updated and gathered together."""

    parameters: tuple[str, ...]
    groups: tuple[Group, ...]
    """Each group holds equal copies; several groups hold different experts."""
    within: int
    """Over how many neighbours in a group one copy is divided; there are several copies if the
    group has more."""
    rule: StateRule
    sizes: tuple[int, ...]
    """Numbers in each parameter, or in a device's shard of it."""
    offsets: tuple[int, ...]
    """Where each begins in the flat buffer that holds a copy: one after another, or, if they are
    not ``sliced``, each within one of the parts."""
    share: int
    """Numbers in one of the equal parts of that buffer, of which there are ``within``."""
    sliced: bool
    """Whether a parameter may lie in several parts."""
    ways: int
    """Over how many devices the parameters are divided as experts."""
    dim: int
    """The dimension along which they are divided as experts."""
    trained: bool
    dtype: torch.dtype
    gradient: torch.dtype
    """What gradients are summed in; if not ``dtype``, the optimizer has a copy in it."""
    sections: tuple[int, ...] = ()
    """Sizes along ``dim`` that are divided each for itself, as in a fused weight."""
    axis: str = "ep"
    """What the axis along which the groups lie is called."""
    alike: int = 1
    """How many neighbours in a group make equal gradients, which are summed over the others."""

    @property
    def elements(self) -> int:
        """Numbers in one of the equal copies."""
        return sum(self.sizes)

    def updated_by(self, rank: int) -> list[str]:
        """The parameters of which member ``rank`` of those that divide a copy updates all or
        some."""
        low = rank * self.share if self.level else 0
        high = low + self.share if self.level else self.share * self.within
        places = zip(self.parameters, self.offsets, self.sizes, strict=True)
        return [name for name, start, size in places if max(low, start) < min(high, start + size)]

    @property
    def level(self) -> int:
        """What is divided: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also
        parameters."""
        return self.rule.zero if self.within > 1 else 0

    @property
    def copies(self) -> int:
        """How many copies a group holds together."""
        return len(self.groups[0]) // self.within

    @property
    def shard_groups(self) -> tuple[Group, ...]:
        """The devices that shard one copy among them."""
        n = self.within
        return tuple(g[i : i + n] for g in self.groups for i in range(0, len(g), n))

    @property
    def replica_groups(self) -> tuple[Group, ...]:
        """The devices that have the same shard of different copies."""
        return tuple(g[i :: self.within] for g in self.groups for i in range(self.within))


class Rest(Enum):
    """A share of a GPU without a number: what the numbers of all streams leave."""

    REST = "rest"

    def __str__(self) -> str:
        return self.value


Sms = int | Rest
"""A share of a GPU's multiprocessors (SMs)."""


@dataclass(frozen=True, slots=True)
class StreamRule:
    """What is asked of a logical stream."""

    priority: int = 0
    sms: Sms | None = None
    """Its share of a GPU; without one it runs on all SMs, also those of others' shares."""


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """What an optimizer takes, in bytes for each byte that it updates."""

    state: float = 2.0
    """Kept between steps: 2 for Adam."""
    update: float = 0.0
    """Needed while it updates a parameter."""
    together: bool = False
    """Whether it needs that for all parameters at once, and not one after another."""
    scalars: int = 0
    """Bytes kept for each parameter, whatever its size."""
    whole: bool = False
    """Whether its step is about all parameters of a device, and not about one bucket after
    another: then the last update waits for all gradients, and takes the step."""
    tensors: tuple[str, ...] = ()
    """Parameters that it must have whole, and not in slices: where they are divided, each device
    gets some of them."""
