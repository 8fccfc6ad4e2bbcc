"""Every kind of collective has a full definition, and all backends compute the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from piper.ir.collectives import COLLECTIVES, ENDS, Move
from piper.ir.ops import Collective
from piper.ir.plan.instructions import Instruction, Verb
from piper.ir.plan.plan import Plan
from piper.runtime.comm.communicators import Endpoint
from piper.runtime.comm.gloo import Gloo
from piper.runtime.comm.loopback import Hub, Loopback
from piper.runtime.comm.protocol import Comm


def tensors(kind: Move, members: int, elements: int) -> list[list[Tensor]]:
    """Each member's parts, in multiples of ``elements``; their sums depend on the order."""
    random = torch.Generator().manual_seed(members * elements)
    parts = COLLECTIVES[kind].parts(members)
    return [
        [torch.randn(n * elements, generator=random) * 10.0**member for n in parts]
        for member in range(members)
    ]


def done(comms: list[Comm], kind: Move, brought: list[list[Tensor]]) -> list[list[Tensor]]:
    group = tuple(range(len(comms)))
    begun = [
        comm.collective(kind, 0, "s", group)(*mine)
        for comm, mine in zip(comms, brought, strict=True)
    ]
    for handle in begun:
        if handle is not None:
            handle.join()
    return brought


def loopback(kind: Move, members: int) -> list[Comm]:
    hub = Hub(accelerator=False)
    return [Loopback(hub, device) for device in range(members)]


def gloo(kind: Move, members: int) -> list[Comm]:
    group = tuple(range(members))
    only = Instruction(Verb.COLLECTIVE, 0, "only", "s", Collective(*ENDS[kind], (group,)))
    plan = Plan(group, (only,), (), (), ())
    store, limit = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(members) as pool:  # members wait for each other
        return list(pool.map(lambda d: Gloo(Endpoint(d, store, limit, "127.0.0.1"), [plan]), group))


def test_every_move_that_communicates_is_defined() -> None:
    assert set(COLLECTIVES) == set(Move) - {Move.NOTHING, Move.SELECT}


@pytest.mark.parametrize("elements", [3, 5000], ids=["small", "large"])
@pytest.mark.parametrize("members", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", COLLECTIVES, ids=lambda kind: kind.value)
def test_gloo_does_what_virtual_devices_do(kind: Move, members: int, elements: int) -> None:
    ways: list[Callable[[Move, int], list[Comm]]] = [loopback, gloo]
    found = []
    for way in ways:
        comms = way(kind, members)
        found.append(done(comms, kind, tensors(kind, members, elements)))
        for comm in comms:
            comm.close()
    for ours, theirs in zip(*found, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Move.ALL_REDUCE, [[[4.0, 6.0]], [[4.0, 6.0]]]),
        (Move.REDUCE_SCATTER, [[[1.0, 2.0], [4.0]], [[3.0, 4.0], [6.0]]]),
        (Move.ALL_GATHER, [[[1.0], [1.0, 3.0]], [[3.0], [1.0, 3.0]]]),
        (Move.ALL_TO_ALL, [[[1.0, 2.0], [1.0, 3.0]], [[3.0, 4.0], [2.0, 4.0]]]),
    ],
    ids=lambda item: item.value if isinstance(item, Move) else "",
)
def test_what_two_members_get(kind: Move, expected: list[list[list[float]]]) -> None:
    """One member has 1, 2 and the other 3, 4; a kind that takes one element gets the first."""
    takes, *gives = COLLECTIVES[kind].parts(2)
    size = 2 if kind is Move.ALL_REDUCE else takes
    brought = [
        [torch.tensor(own)[:size], *(torch.zeros(n) for n in gives)]
        for own in ([1.0, 2.0], [3.0, 4.0])
    ]
    found = done(loopback(kind, 2), kind, brought)
    assert [[x.tolist() for x in mine] for mine in found] == expected
