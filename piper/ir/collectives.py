"""The changes of a value's layout along a mesh axis, and the definition of each collective.

A member brings one tensor that is changed in place, or one input and one output. Virtual devices
and gloo add sums in the order of the group, so their results are equal. NCCL adds in its own order.

n is the number of members. S is the bytes that enter a reduction or leave a gather.

                                  a member sends      in rounds
    all_reduce                    2 (n - 1) / n S     2 (n - 1)      a ring, for many bytes
                              or  2 S                 2 log2(n)      a tree, for few bytes
    reduce_scatter, all_gather    (n - 1) / n S       n - 1          a ring
    all_to_all                    (n - 1) / n S       1              each to each
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

MemberTensors = tuple[Tensor, ...]
_Number = TypeVar("_Number", float, Fraction)
_c10d: Any = dist.distributed_c10d  # its stubs lack some of the options


class Move(Enum):
    """What changes the layout of a value, or of its gradient, along an axis. Gathered, scattered or
    selected parts of an activation are indexed by an extra dimension 0, of the axis' size."""

    NOTHING = "nothing"
    SELECT = "select"
    """Each device takes its own part of a replicated value."""
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"

    __hash__ = object.__hash__  # Enum's own is slow


@dataclass(frozen=True, slots=True)
class Sharded:
    """Each device has its part of dimension ``dim``."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicated:
    """All devices have the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The value is the sum of those of all devices."""

    def __str__(self) -> str:
        return "P(sum)"


Placement = Sharded | Replicated | PartialSum
"""Where a value is along a mesh axis, in the terms and the text of torch's DTensor, whose own
classes need its compiler."""
ENDS: Mapping[Move, tuple[Placement, Placement]] = {
    Move.NOTHING: (Replicated(), Replicated()),
    Move.SELECT: (Replicated(), Sharded(0)),
    Move.REDUCE_SCATTER: (PartialSum(), Sharded(0)),
    Move.ALL_REDUCE: (PartialSum(), Replicated()),
    Move.ALL_TO_ALL: (Sharded(0), Sharded(0)),
    Move.ALL_GATHER: (Sharded(0), Replicated()),
}
"""The placements before and after each move, of tensors whose dimension 0 indexes the parts."""
_MOVES = {(type(made), type(wanted)): move for move, (made, wanted) in ENDS.items()}


def packing(shape: Sequence[int], dim: int, ways: int) -> tuple[list[int], list[int]]:
    """How ``ways`` parts along ``dim`` get into an additional first dimension: the sizes of a
    reshape, and the order of the dimensions after it."""
    sizes = [*shape[:dim], ways, shape[dim] // ways, *shape[dim + 1 :]]
    return sizes, [dim, *(i for i in range(len(sizes)) if i != dim)]


def unpacking(shape: Sequence[int], dim: int) -> tuple[list[int], list[int]]:
    """The inverse: an order of dimensions, and the sizes of a reshape after it."""
    ways, *sizes = shape
    sizes[dim] *= ways
    return [*range(1, dim + 1), 0, *range(dim + 1, len(shape))], sizes


def move_between(made: Placement, wanted: Placement) -> Move:
    """The move from one placement to another."""
    return _MOVES[type(made), type(wanted)]


class Route(Enum):
    """To whom the members of a collective send."""

    RING = "ring"
    """Each to the next one, in the order of the group."""
    TREE = "tree"
    DIRECT = "direct"
    """Each to all others."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm of a collective."""

    rounds: Callable[[int], int]
    """The number of sequential messages, given the number of members."""
    shares: int = 0
    """How many times a member sends (n - 1) / n of the bytes: all parts except its own."""
    wholes: int = 0
    """How many times a member sends all bytes."""
    route: Route = Route.RING

    def sent(self, nbytes: int, share: _Number) -> _Number:
        """Bytes that a member sends; ``share`` is (n - 1) / n of ``nbytes``."""
        return self.shares * share + self.wholes * nbytes


def _halvings(members: int) -> int:
    return math.ceil(math.log2(members))


_TWO_RINGS = Algorithm(lambda n: 2 * (n - 1), shares=2)
_TREE = Algorithm(lambda n: 2 * _halvings(n), wholes=2, route=Route.TREE)
_RING = Algorithm(lambda n: n - 1, shares=1)
_DIRECT = Algorithm(lambda n: 1, shares=1, route=Route.DIRECT)


@dataclass(frozen=True, slots=True)
class Definition:
    """One kind of collective."""

    algorithms: tuple[Algorithm, ...]
    parts: Callable[[int], tuple[int, ...]]
    """For n members: the number of parts in each tensor of one member."""
    act: Callable[[Sequence[MemberTensors]], None]
    """Does it for all members at once, given their tensors in the order of the group."""
    begin: Callable[..., Any]
    """Calls a torch communicator with ``options()`` and one member's tensors."""
    options: Callable[[], Any]


def _all_reduce(everyone: Sequence[MemberTensors]) -> None:
    """Each tensor becomes the sum over the group."""
    (total,), *others = everyone
    for (x,) in others:
        total += x
    for (x,) in others:
        x.copy_(total)


def _reduce_scatter(everyone: Sequence[MemberTensors]) -> None:
    """The output becomes this member's part of the sum of the inputs."""
    parts = [x.chunk(len(everyone)) for x, _ in everyone]
    for rank, (_, out) in enumerate(everyone):
        out.copy_(parts[0][rank])
        for part in parts[1:]:
            out += part[rank]


def _all_gather(everyone: Sequence[MemberTensors]) -> None:
    """The output becomes the inputs of all members, in the order of the group."""
    for _, out in everyone:
        torch.cat([x for x, _ in everyone], out=out)


def _all_to_all(everyone: Sequence[Any]) -> None:
    """Part i of the input goes to member i; part i of the output comes from member i. Parts have
    equal sizes, or the numbers of rows that each member gives."""
    parts = [x.split(rows[0]) if rows else x.chunk(len(everyone)) for x, _, *rows in everyone]
    for rank, (_, out, *_) in enumerate(everyone):
        torch.cat([part[rank] for part in parts], out=out)


COLLECTIVES: Mapping[Move, Definition] = {
    Move.ALL_REDUCE: Definition(
        (_TWO_RINGS, _TREE),
        lambda n: (1,),
        _all_reduce,
        lambda backend, options, x: backend.allreduce([x], options),
        _c10d.AllreduceOptions,
    ),
    Move.REDUCE_SCATTER: Definition(
        (_RING,),
        lambda n: (n, 1),
        _reduce_scatter,
        lambda backend, options, x, out: backend._reduce_scatter_base(out, x, options),
        _c10d.ReduceScatterOptions,
    ),
    Move.ALL_GATHER: Definition(
        (_RING,),
        lambda n: (1, n),
        _all_gather,
        lambda backend, options, x, out: backend._allgather_base(out, x, options),
        _c10d.AllgatherOptions,
    ),
    Move.ALL_TO_ALL: Definition(
        (_DIRECT,),
        lambda n: (n, n),
        _all_to_all,
        lambda backend, options, x, out, sent=[], got=[]: backend.alltoall_base(
            out, x, got, sent, options
        ),
        _c10d.AllToAllOptions,
    ),
}
"""The moves that communicate."""
