"""Devices along an axis that does not shard the batch have the same rows: they compute the same
values, which count once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import piper
from piper.strategies.directives import Directive, partition, place, replicate, shard, split
from tests.plan_checker import check as check_plans
from tests.runtime.test_groups import EXPERTS, ROWS, SEQ, check_all_plans
from tests.runtime.test_runtime import (
    Dropping,
    Experts,
    Tied,
    Tower,
    built,
    mean_loss,
    token_batches,
)
from tests.training import ULPS, assert_same, compiled, plain, shared_captures, steps, train

Place = tuple[piper.Mesh | list[int], Any]

DP_TP: Place = (piper.Mesh(range(4), dp=2, tp=2), "dp")
TP_DP: Place = (piper.Mesh(range(4), tp=2, dp=2), "dp")


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


def placed(*places: Place, zero: int = 0, parts: int = 2) -> list[Directive]:
    return [
        *([partition("layer", into="PP", parts=len(places))] if len(places) > 1 else []),
        split(parts=parts),
        *(
            place({"PP": i} if len(places) > 1 else {}, devices=mesh, batch=batch)
            for i, (mesh, batch) in enumerate(places)
        ),
        replicate({}, zero=zero, bucket_mb=1e-3),
    ]


@pytest.mark.cases(fast=8, slow=6)
@pytest.mark.parametrize(
    "zero", [0, 2, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (1, 3))]
)
@pytest.mark.parametrize(
    "places",
    [
        [DP_TP],
        [TP_DP],
        [DP_TP, TP_DP],
        [DP_TP, ([0, 1, 2, 3], None)],
        [([0, 1, 2, 3], None), DP_TP],
        [DP_TP, (piper.Mesh([4, 5, 6], tp=3), ())],
        [(piper.Mesh([4, 5, 6], tp=3), ()), DP_TP],
        [(piper.Mesh([0, 1, 2], tp=3), ()), (piper.Mesh([3, 4], tp=2), ())],
        [(piper.Mesh(range(6), dp=3, tp=2), "dp"), (piper.Mesh(range(3, 7), dp=2, tp=2), "dp")],
        [([2, 3], None), (piper.Mesh([0, 1, 2, 3], a=2, dp=1, b=2), ["dp", "a"])],
    ],
    ids=[
        "dp-tp", "tp-dp", "turned", "to-all", "from-all", "to-3", "from-3", "3-2", "over", "axes",
    ],
)  # fmt: skip
def test_replicas_equal_one_device(places: list[Place], zero: int) -> None:
    model, batches = built(Tower), token_batches(ROWS)
    program = compiled(model, placed(*places, zero=zero), mean_loss, batches)
    check_all_plans(program)
    assert_same(train(program, batches), plain(model, mean_loss, batches, microbatches=4), ULPS)


@pytest.mark.parametrize("clip", [None, pytest.param(0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("places", [[DP_TP, DP_TP], [DP_TP, ([0, 1, 2, 3], None)]])
def test_a_tied_weight_of_replicas(places: list[Place], clip: float | None) -> None:
    """The first and the last region share a weight, with the same replicas and with others."""
    model, batches = built(Tied), token_batches(ROWS)
    strategy = placed(*places, zero=1)
    program = compiled(model, strategy, mean_loss, batches, clip_norm=clip)
    check_plans(program.lowered.dag, program.plans, models=program.models, clip=clip is not None)
    wanted = plain(model, mean_loss, batches, microbatches=4, clip_norm=clip)
    assert_same(train(program, batches), wanted, ULPS)


def test_replicas_draw_the_same() -> None:
    """Dropout masks depend on the rows, not on the device."""
    model, batches = built(Dropping), token_batches(ROWS)
    two = compiled(model, placed(([0, 1], None)), mean_loss, batches)
    four = compiled(model, placed(DP_TP), mean_loss, batches)
    assert_same(train(four, batches), train(two, batches), ULPS)


@pytest.mark.parametrize("axis", [None, "ep"])
@pytest.mark.parametrize("attention", ["dp", pytest.param("all", marks=pytest.mark.slow)])
def test_experts_beside_replicas(axis: str | None, attention: str) -> None:
    model, batches = built(Experts, 2, EXPERTS), token_batches(ROWS, SEQ)
    mesh = piper.Mesh(range(8), tp=2, dp=2, ep=2)
    batch = None if attention == "all" else ["dp", "ep"]
    strategy = [
        split(parts=1),
        place({"EP": "-"}, devices=mesh, batch=batch),
        place({"EP": "*"}, devices=mesh, batch=["dp", "ep"]),
        shard({"EP": "*"}, axis=axis),
        replicate({"EP": "-"}, zero=3, bucket_mb=1e-3),
    ]
    program = compiled(model, strategy, mean_loss, batches)
    check_all_plans(program)
    assert_same(train(program, batches), plain(model, mean_loss, batches, microbatches=4), ULPS)


@pytest.mark.slow
def test_replicas_in_processes() -> None:
    model, batches = built(Tower), token_batches(ROWS)
    program = compiled(model, placed(DP_TP, ([3, 2], None), zero=2), mean_loss, batches)
    virtual = train(program, batches)
    with piper.launch(program, on="processes") as trainer:
        assert_same(steps(trainer, batches), virtual, 0.0)


def test_replicas_that_differ_between_microbatches() -> None:
    model, batches = built(Tower), token_batches(ROWS)
    strategy = [
        split(parts=2),
        place({"MB": 0}, devices=DP_TP[0], batch="dp"),
        place({"MB": 1}, devices=[0, 1]),
    ]
    with pytest.raises(piper.DirectiveError, match="computed identically by 1 devices each"):
        compiled(model, strategy, mean_loss, batches)


def test_layouts_are_printed() -> None:
    model, batches = built(Experts, 1, EXPERTS), token_batches(ROWS, SEQ)
    mesh = piper.Mesh(range(8), tp=2, dp=2, ep=2)
    strategy = [
        place({}, devices=mesh, batch=["dp", "ep"]),
        shard({"EP": "*"}, axis="ep"),
        replicate({"EP": "-"}, zero=2),
    ]
    program = compiled(model, strategy, mean_loss, batches)
    lines = [" ".join(line.split()) for line in program.layouts.splitlines()]
    where = "@0,4,1,5,2,6,3,7"
    assert [
        f"x0 inputs[0] [6, 12] {where} dp S(0), ep S(0), tp R",
        f"v6 view_1 [12, 6, 7] {where} dp S(1), ep S(1), tp R",
        f"v6 view_1 [12, 6, 7] in layer[0] EP[0] {where} dp S(1), ep S(0), tp R",
        f"v10 cross_entropy_loss_mean [] {where} dp P(sum), ep P(sum), tp R",
        f"dw2 layer[0] EP[0] {where} dp P(sum), ep S(0), tp R",
        f"dw0 embed[0] {where} dp P(sum), ep P(sum), tp R",
        f"bucket0 parameters at rest {where} shard R",
        f"bucket0 gradients as made {where} shard P(sum)",
        f"bucket0 optimizer state {where} shard S(0)",
    ] == [line for line in lines if line.split()[0] in ("x0", "v6", "v10", "dw2", "dw0", "bucket0")]
    assert program.layouts in program.text()
