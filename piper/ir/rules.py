"""Rules that directives attach to a DAG for state, experts, shards and streams; lowering applies
them."""

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
    """The stream on which a group sends its values to other groups."""

    stream: str
    made_by: int


P2P = SendRule("p2p", 0)
"""The default, where no directive sets a stream."""


@dataclass(frozen=True, slots=True)
class StateRule:
    """How replicated parameters are synchronized (data parallelism and ZeRO)."""

    zero: int
    bucket_bytes: int
    reduce_stream: str
    gather_stream: str
    made_by: int
    within: int | None = None
    """The number of devices that shard one copy of the state (HSDP); None for as many as
    possible."""


@dataclass(frozen=True, slots=True)
class ShardRule:
    """How a chunk's parameters are sharded over its group: as experts or by tensor parallelism."""

    ways: int
    dim: int
    stream: str
    made_by: int
    stride: int = 1
    """The distance in the group between devices of one shard group."""
    sections: tuple[int, ...] = ()
    """Sizes of sections along ``dim`` that are sharded separately, as in a fused weight."""
    axis: str = "ep"
    capacity: float | None = None
    """For rows sorted by expert: the capacity, as a multiple of a device's own rows; None for all
    rows."""

    def room(self, rows: int) -> int:
        """A device's capacity in rows, if each device has ``rows`` of its own."""
        most = rows * self.ways
        if self.capacity is None:
            return most
        wanted = math.ceil(rows * self.capacity)
        return min(most, self.ways * math.ceil(wanted / self.ways))

    def part(self, rank: int) -> int:
        """The number of the expert shard on member ``rank`` of a group."""
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
    """The distance in the group between neighbours along the axis."""
    stream: str
    made_by: int
    parameters: Mapping[str, int | Style]
    """The dimension, or style, by which each is sharded; other parameters are replicated."""
    sequence: int | None = None
    """Sequence parallelism: the dimension along which otherwise replicated activations are
    sharded."""
    split: int | None = None
    """Context parallelism: the sequence dimension, along which the batch tensors are sharded."""
    context: ContextAttention | None = None
    """How attention works on a sharded sequence."""


def shard_numel(shape: Sequence[int], dim: int, ways: int) -> int:
    """Elements in each of ``ways`` shards along ``dim``; shards of an uneven dimension are
    padded."""
    if ways == 1:
        return math.prod(shape)
    return math.prod(shape) // shape[dim] * -(-shape[dim] // ways)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are reduced, updated and gathered together."""

    parameters: tuple[str, ...]
    groups: tuple[Group, ...]
    """Each group holds equal copies; different groups hold different experts or tensor shards."""
    within: int
    """The number of adjacent devices in a group that shard one copy; a larger group holds several
    copies."""
    rule: StateRule
    sizes: tuple[int, ...]
    """Elements of each parameter, or of a device's shard of it."""
    offsets: tuple[int, ...]
    """The offset of each parameter in the flat buffer of one copy: consecutive, or, if not
    ``sliced``, each parameter within one part."""
    share: int
    """Elements in each of the ``within`` equal parts of that buffer."""
    sliced: bool
    """Whether a parameter may span several parts."""
    ways: int
    """The number of devices that shard the parameters as experts or by tensor parallelism."""
    dim: int
    """The dimension of that sharding."""
    trained: bool
    dtype: torch.dtype
    gradient: torch.dtype
    """The dtype of gradient sums; if not ``dtype``, the optimizer has a master copy in it."""
    sections: tuple[int, ...] = ()
    """Sizes of sections along ``dim`` that are sharded separately, as in a fused weight."""
    axis: str = "ep"
    """The name of the axis that ``groups`` indexes."""
    alike: int = 1
    """How many adjacent devices in a group make equal gradients; the sum is over the others."""

    @property
    def elements(self) -> int:
        """Elements in one copy, without padding."""
        return sum(self.sizes)

    def updated_by(self, rank: int) -> list[str]:
        """The parameters that member ``rank`` of a shard group updates, wholly or partly."""
        low = rank * self.share if self.level else 0
        high = low + self.share if self.level else self.share * self.within
        places = zip(self.parameters, self.offsets, self.sizes, strict=True)
        return [name for name, start, size in places if max(low, start) < min(high, start + size)]

    @property
    def level(self) -> int:
        """The ZeRO level: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also
        parameters."""
        return self.rule.zero if self.within > 1 else 0

    @property
    def copies(self) -> int:
        """The number of copies in a group."""
        return len(self.groups[0]) // self.within

    @property
    def shard_groups(self) -> tuple[Group, ...]:
        """The groups of devices that shard one copy."""
        n = self.within
        return tuple(g[i : i + n] for g in self.groups for i in range(0, len(g), n))

    @property
    def replica_groups(self) -> tuple[Group, ...]:
        """The groups of devices that hold the same shard of different copies."""
        return tuple(g[i :: self.within] for g in self.groups for i in range(self.within))


class Rest(Enum):
    """An SM share without a number: all SMs that the streams with numbers leave."""

    REST = "rest"

    def __str__(self) -> str:
        return self.value


Sms = int | Rest
"""A share of a GPU's multiprocessors (SMs)."""


@dataclass(frozen=True, slots=True)
class StreamRule:
    """The settings of a logical stream."""

    priority: int = 0
    sms: Sms | None = None
    """Its SM share; without one it runs on all SMs, including other streams' shares."""


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """The memory of an optimizer, in bytes for each byte that it updates."""

    state: float = 2.0
    """Kept between steps: 2 for Adam."""
    update: float = 0.0
    """Temporary, during an update."""
    together: bool = False
    """Whether it needs ``update`` for all parameters at once, not one after another."""
    scalars: int = 0
    """Bytes kept for each parameter, whatever its size."""
    whole: bool = False
    """Whether one step covers all parameters of a device, not one bucket after another. Then the
    last update waits for all gradients and takes the step."""
    tensors: tuple[str, ...] = ()
    """Parameters that it needs whole, not sliced. ZeRO assigns each of them to one device."""
