"""The definition of each kind of collective, for all transports.

A member brings one tensor that is changed in place, or one input and one output. Loopback and gloo
add sums in the order of the group, so their results are equal. NCCL adds in its own order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.ir.collectives import CollectiveKind

MemberTensors = tuple[Tensor, ...]
_c10d: Any = dist.distributed_c10d  # its stubs lack some of the options


@dataclass(frozen=True, slots=True)
class Definition:
    """One kind of collective: a reference implementation, and the call to torch."""

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


DEFINITIONS: Mapping[CollectiveKind, Definition] = {
    CollectiveKind.ALL_REDUCE: Definition(
        lambda n: (1,),
        _all_reduce,
        lambda backend, options, x: backend.allreduce([x], options),
        _c10d.AllreduceOptions,
    ),
    CollectiveKind.REDUCE_SCATTER: Definition(
        lambda n: (n, 1),
        _reduce_scatter,
        lambda backend, options, x, out: backend._reduce_scatter_base(out, x, options),
        _c10d.ReduceScatterOptions,
    ),
    CollectiveKind.ALL_GATHER: Definition(
        lambda n: (1, n),
        _all_gather,
        lambda backend, options, x, out: backend._allgather_base(out, x, options),
        _c10d.AllgatherOptions,
    ),
    CollectiveKind.ALL_TO_ALL: Definition(
        lambda n: (n, n),
        _all_to_all,
        lambda backend, options, x, out, sent=[], got=[]: backend.alltoall_base(
            out, x, got, sent, options
        ),
        _c10d.AllToAllOptions,
    ),
}
