"""Regions on groups of any size and order: values between them are redistributed, and the numbers
stay those of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.strategies.directives import Directive, partition, place, replicate, shard, split
from piper.strategies.strategy import Strategy
from tests.plan_checker import check as check_plans
from tests.runtime.test_runtime import Experts, Tower, built, mean_loss, token_batches
from tests.training import (
    ULPS,
    assert_same,
    compiled,
    plain,
    shared_captures,
    steps,
    train,
)

ROWS, SEQ, EXPERTS = 24, 12, 12
"""Rows and experts divide evenly over 1, 2, 3, 4, 6 and 12 devices."""


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    "groups",
    [
        [[0, 1], [2, 3, 4]],
        [[0, 1, 2], [3, 4]],
        [[0, 1, 2], [3, 4, 5, 6]],
        [[0, 1, 2, 3], [0, 1, 2]],
        [[0, 1, 2, 3], [5, 4, 3, 2, 1, 0]],
    ],
    ids=["2-3", "3-2", "3-4", "4-3-within", "4-6-turned"],
)
@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_stages_of_any_sizes(groups: Sequence[Sequence[int]], zero: int) -> None:
    strategy = [
        partition("layer", into="PP", parts=2),
        split(parts=2),
        *(place({"PP": i}, devices=group) for i, group in enumerate(groups)),
        replicate({}, zero=zero, bucket_mb=1e-3),
    ]
    model, batches = built(Tower), token_batches(ROWS)
    found = train(compiled(model, strategy, mean_loss, batches), batches)
    assert_same(found, plain(model, mean_loss, batches, microbatches=4), ULPS)


def check_all_plans(program: piper.Program) -> None:
    dag, plans, memory = program.lowered.dag, program.plans, program.memory
    check_plans(dag, plans, memory, models=program.models, optimizer_bytes=1.0)


def experts(
    attention: Sequence[int], others: Sequence[int], ways: int | None, zero: int
) -> list[Directive]:
    return [
        split(parts=2),
        place({"EP": "-"}, devices=attention),
        place({"EP": "*"}, devices=others),
        shard({"EP": "*"}, ways=ways),
        replicate({"EP": "-"}, zero=zero, bucket_mb=1e-3),
    ]


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize(
    "zero", [3, *(pytest.param(zero, marks=pytest.mark.slow) for zero in range(3))]
)
@pytest.mark.parametrize(
    ("attention", "others", "ways"),
    [
        pytest.param([0, 1], [2, 3], None, marks=pytest.mark.slow),
        ([0, 1], [0, 1, 2, 3], None),
        pytest.param([0, 1], [2, 3, 4, 5], None, marks=pytest.mark.slow),
        ([0, 1], [2, 3, 4], None),
        pytest.param([0, 1], [0, 1, 2], None, marks=pytest.mark.slow),
        pytest.param([0, 1, 2, 3], [2, 3, 4], None, marks=pytest.mark.slow),
        ([0, 1, 2], [2, 1], None),
        pytest.param([0, 1, 2], [3], None, marks=pytest.mark.slow),
        pytest.param([0, 1, 2, 3], [4, 5, 6, 7, 8, 9], 3, marks=pytest.mark.slow),
        pytest.param([0, 1, 2, 3], [3, 2, 1, 0], 2, marks=pytest.mark.slow),
    ],
    ids=[
        "others", "2-4-over", "2-4-others", "2-3-others", "2-3-over", "4-3-half", "3-2-turned",
        "3-1", "4-6-copies", "turned",
    ],
)  # fmt: skip
def test_experts_on_other_devices(
    attention: Sequence[int], others: Sequence[int], ways: int | None, zero: int
) -> None:
    model, batches = built(Experts, 2, EXPERTS), token_batches(ROWS, SEQ)
    strategy = experts(attention, others, ways, zero)
    found = train(compiled(model, strategy, mean_loss, batches), batches)
    assert_same(found, plain(model, mean_loss, batches, microbatches=4), ULPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        [2, 3, 4],
        pytest.param([2, 3, 4, 5], marks=pytest.mark.slow),
        pytest.param([1], marks=pytest.mark.slow),
    ],
    ids=["2-3", "2-4", "2-1"],
)
def test_memory_between_groups(others: list[int]) -> None:
    """Parts of a tensor that are not contiguous are copied; the prediction includes the copies."""
    model, batches = built(Experts, 2, EXPERTS), token_batches(ROWS, SEQ)
    program = compiled(model, experts([0, 1], others, None, 1), mean_loss, batches)
    check_all_plans(program)
    (inputs, targets) = batches[0]
    with piper.launch(program) as trainer:
        trainer.step(*inputs, *targets)
        measured = trainer.measure_memory(*inputs, *targets)
    predicted = {d: memory.peak for memory in program.memory for d in memory.devices}
    for device, found in measured.items():
        assert 0.7 * predicted[device] < found.peak <= predicted[device], device


@pytest.mark.slow
def test_experts_on_other_processes() -> None:
    model, batches = built(Experts, 2, EXPERTS), token_batches(ROWS, SEQ)
    program = compiled(model, experts([0, 1], [1, 2, 3], None, 3), mean_loss, batches)
    virtual = train(program, batches)
    with piper.launch(program, on="processes") as trainer:
        found = steps(trainer, batches)
    assert_same(found, virtual, 0.0)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    "mesh",
    [
        piper.Mesh(range(4), dp=2, ep=2),
        piper.Mesh(range(4), ep=2, dp=2),
        piper.Mesh([5, 0, 3, 2, 1, 4], ep=3, dp=2),
        piper.Mesh(range(8), pods=2, ep=2, dp=2),
        piper.Mesh(range(4), ep=4),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "attention",
    [None, pytest.param([0, 1], marks=pytest.mark.slow)],
    ids=["with", "apart"],
)
def test_experts_along_an_axis(mesh: piper.Mesh, attention: list[int] | None) -> None:
    model, batches = built(Experts, 2, EXPERTS), token_batches(ROWS, SEQ)
    strategy = Strategy(
        [
            split(parts=1),
            place({"EP": "-"}, devices=attention or mesh),
            place({"EP": "*"}, devices=mesh, batch=[axis for axis, _ in mesh.axes]),
            shard({"EP": "*"}, axis="ep"),
            replicate({"EP": "-"}, zero=3, bucket_mb=1e-3),
            replicate({"EP": "*"}, zero=1, bucket_mb=1e-3),
        ]
    )
    assert Strategy.from_json(strategy.to_json()) == strategy
    program = compiled(model, strategy.directives, mean_loss, batches)
    check_all_plans(program)
    found = train(program, batches)
    assert_same(found, plain(model, mean_loss, batches, microbatches=4), ULPS)
    held = {b.groups for b in program.lowered.dag.buckets if b.ways > 1}
    along = [mesh.devices[i * mesh.stride("ep")] for i in range(mesh.size("ep"))]
    assert {next(i for i, g in enumerate(groups) if d in g) for groups in held for d in along} == (
        set(range(mesh.size("ep")))
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: piper.Mesh([0, 1, 2], dp=2), ["dp=2 is 2 devices", "3 are given"]),
        (lambda: piper.Mesh([0, 1]), ["names no axis", "dp=2"]),
        (lambda: piper.Mesh([0, 1], dp=True), ["dp=True", "positive"]),
        (lambda: piper.Mesh("01", dp=2), ["list of numbers"]),
    ],
    ids=["sizes", "no-axis", "no-number", "no-list"],
)
def test_meshes_that_are_none(make: Callable[[], piper.Mesh], words: list[str]) -> None:
    with pytest.raises(piper.DirectiveError) as error:
        make()
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("placed", "sharded", "words"),
    [
        ({"batch": "tp"}, {}, ["axis 'tp'", "the mesh has dp, ep"]),
        (
            {"batch": "dp"},
            {"axis": "ep"},
            ["declares no plan for tensor parallelism", "parameters="],
        ),
        ({"devices": [0, 1, 2, 3], "batch": "dp"}, {}, ["names axes", "Mesh([0, 1, 2, 3], ...)"]),
        ({}, {"axis": "tp"}, ["axis='tp'", "has the axes dp, ep", "tp=..."]),
        ({"devices": [0, 1]}, {"axis": "ep"}, ["has no named axes", "ep=..."]),
        ({}, {"axis": "ep", "ways": 2}, ["give one of them"]),
        ({"devices": piper.Mesh([0, 0], ep=2)}, {"axis": "ep"}, ["names a device twice"]),
    ],
    ids=["unknown", "replicated", "no-mesh", "unknown-axis", "no-axes", "both", "twice"],
)
def test_axes_that_are_refused(
    placed: dict[str, Any], sharded: dict[str, Any], words: list[str]
) -> None:
    mesh = piper.Mesh([0, 1, 2, 3], dp=2, ep=2)
    strategy = [place({}, **{"devices": mesh, **placed}), shard({"EP": "*"}, **sharded)]
    model, batches = built(Experts, 2, EXPERTS), token_batches(ROWS, SEQ)
    with pytest.raises(piper.DirectiveError) as error:
        compiled(model, strategy, mean_loss, batches)
    assert all(word in str(error.value) for word in words), error.value


class Turned(nn.Module):
    """The tensor between the regions has its rows in the order that ``turn`` makes."""

    def __init__(self, turn: Callable[[Tensor], Tensor], back: Callable[[Tensor, int], Tensor]):
        super().__init__()
        self.turn, self.back = turn, back
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        with piper.annotate("a"):
            x = self.turn(torch.tanh(self.a(x)))
        with piper.annotate("b"):
            return self.b(self.back(x, rows))


TURNS = {
    "flat": (lambda x: x.flatten(0, 1), lambda x, n: x.unflatten(0, (n, -1))),
    "second": (lambda x: x.transpose(0, 1), lambda x, _: x.transpose(0, 1)),
    "second-flat": (
        lambda x: x.permute(1, 0, 2).flatten(1, 2),
        lambda x, n: x.unflatten(1, (n, -1)).transpose(0, 1),
    ),
    "scrambled": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda x, n: x.unflatten(0, (-1, n)).transpose(0, 1),
    ),
    "scrambled-last": (
        lambda x: x.permute(1, 2, 0).flatten(1, 2),
        lambda x, n: x.unflatten(1, (-1, n)).permute(2, 0, 1),
    ),
}


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize(
    "groups",
    [
        [[0, 1], [2, 3, 4]],
        pytest.param([[0], [1, 2]], marks=pytest.mark.slow),
        pytest.param([[0, 1, 2], [3]], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("turn", TURNS)
def test_rows_wherever_they_are(turn: str, groups: list[list[int]]) -> None:
    """Rows may be in any dimension. If another dimension varies slower within the flattened one, no
    part of the tensor is a part of the rows, and the strategy is refused."""
    torch.manual_seed(0)
    model = Turned(*TURNS[turn])
    x, y = torch.randn(2, 6, 4, 8)
    batches = [((x,), (y,))] * 3

    def loss(found: Tensor, wanted: Tensor) -> Tensor:
        return (found - wanted).square().mean()

    strategy = [place({"a": 0}, devices=groups[0]), place({"b": 0}, devices=groups[1])]
    if turn.startswith("scrambled"):
        with pytest.raises(piper.DirectiveError, match=r"do not lie one after another .* place"):
            compiled(model, strategy, loss, batches)
        return
    found = train(compiled(model, strategy, loss, batches), batches)
    assert_same(found, plain(model, loss, batches, microbatches=6), ULPS)


class Slotted(nn.Module):
    """Rows are sorted by value, computed one by one, and put back in their old order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("a"):
            x = self.a(x)
            order = x[:, 0].argsort()
            slots = x[order].unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        with piper.annotate("b"):
            slots = torch.tanh(self.b(slots))
        with piper.annotate("c"):
            back = slots.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
            return self.c(torch.zeros_like(x).index_copy(0, order, back))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [[[0, 1], [2], [3, 4]], [[0], [0, 1, 2], [0]]])
def test_rows_in_an_order_of_their_own_come_back(groups: list[list[int]]) -> None:
    torch.manual_seed(0)
    model = Slotted()
    x, y = torch.randn(2, 24, 8)
    batches = [((x,), (y,))] * 3
    strategy = [place({name: 0}, devices=d) for name, d in zip("abc", groups, strict=True)]
    found = train(compiled(model, strategy, nn.functional.mse_loss, batches), batches)
    assert_same(found, plain(model, nn.functional.mse_loss, batches, microbatches=1), ULPS)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize("groups", [[[0, 1], [2], [2]], [[0], [0], [0, 1]], [[0, 1], [0, 1], [0]]])
def test_rows_in_an_order_of_their_own_go_nowhere_else(groups: list[list[int]]) -> None:
    x = torch.randn(24, 8)
    strategy = [place({name: 0}, devices=d) for name, d in zip("abc", groups, strict=True)]
    with pytest.raises(piper.DirectiveError, match=r"do not lie one after another .* place"):
        compiled(Slotted(), strategy, nn.functional.mse_loss, [((x,), (x,))])
