"""The communicators of a device: only its own, and as few in a large job as in a small one."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.runtime.comm.communicators import Communicator, communicators_of
from piper.strategies import mesh


class Net(nn.Module):
    """Four layers, each with a region of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.experts = nn.ParameterList(nn.Parameter(torch.ones(4, 4, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, weight in zip(self.layers, self.experts, strict=True):
            with piper.annotate("layer"):
                rows = layer(x).transpose(0, 1)
                with piper.annotate("EP"):
                    rows = torch.bmm(rows, weight)
                x = x + rows.transpose(0, 1)
        return x


@functools.cache
def model() -> nn.Module:
    return Net()


def compiled(strategy: piper.Strategy, rows: int) -> piper.Program:
    x = torch.zeros(rows, 4, 4)
    return piper.compile(
        model(),
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def found(program: piper.Program, device: int) -> list[Communicator]:
    plans = [step.plan_of(device) for step in program.steps]
    return list(communicators_of(plans, device))


def counts(strategy: piper.Strategy, rows: int) -> set[int]:
    program = compiled(strategy, rows)
    return {len(found(program, device)) for device in program.devices}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_their_number_does_not_depend_on_the_size_of_the_job(zero: int) -> None:
    sizes = [
        counts(mesh(pp=4, dp=dp, zero=zero, microbatches=4), rows=4 * dp) for dp in (2, 16, 64)
    ]
    assert sizes[0] == sizes[1] == sizes[2]
    assert max(sizes[0]) <= 7  # two neighbours each way, and three groups


def test_experts_add_one() -> None:
    plain = counts(mesh(pp=2, dp=4, microbatches=2), rows=8)
    experts = counts(mesh(pp=2, dp=4, ep=2, microbatches=2), rows=8)
    assert max(experts) <= max(plain) + 2  # the all-to-all, and sums over fewer replicas


def test_members_and_nobody_else() -> None:
    program = compiled(mesh(pp=2, dp=4, ep=2, zero=1, microbatches=2), rows=8)
    everyone: dict[Communicator, set[int]] = {}
    for device in program.devices:
        for one in found(program, device):
            assert device in one.members
            everyone.setdefault(one, set()).add(device)
    assert all(set(one.members) == makers for one, makers in everyone.items())
    assert len({one.name for one in everyone}) == len(everyone)


def test_messages_have_a_communicator_for_each_direction() -> None:
    program = compiled(mesh(pp=2, microbatches=2), rows=2)
    messages = [one for one in found(program, 0) if one.message]
    assert [(one.members, one.name) for one in messages] == [
        ((0, 1), "p2p 0>1"),
        ((1, 0), "p2p 1>0"),
    ]


def orders(groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    strategy = piper.Strategy(
        [
            piper.partition("layer", into="PP", parts=2),
            piper.split(parts=2),
            *(piper.place({"PP": i}, devices=list(group)) for i, group in enumerate(groups)),
            piper.replicate({}),
        ]
    )
    program = compiled(strategy, rows=4)
    return [one.members for one in found(program, 3) if one.stream == "reduce"]


@pytest.mark.slow
def test_ranks_follow_the_order_of_the_group() -> None:
    assert orders([[3, 1], [2, 0]]) == [(3, 1)]
    assert orders([[1, 3], [0, 2]]) == [(1, 3)]


def test_members_connect_in_one_order() -> None:
    """Before the first step, every communicator runs each of its collectives once, which blocks its
    members until all are there: so members must agree on the kinds and on the order."""
    program = compiled(mesh(pp=2, dp=4, zero=3, schedule="dualpipev", microbatches=4), rows=16)
    wanted = {
        d: communicators_of([step.plan_of(d) for step in program.steps], d) for d in program.devices
    }
    for device, mine in wanted.items():
        assert list(mine) == sorted(mine)
        for one, kinds in mine.items():
            assert list(kinds) == sorted(set(kinds), key=lambda kind: kind.value)
            assert bool(kinds) != one.message
            assert all(wanted[d][one] == kinds for d in one.members), device
