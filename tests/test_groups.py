"""Regions on groups of any sizes and orders: what flows between them is divided anew, and the
numbers stay those of one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

import piper
from piper.directives import Directive, partition, place, replicate, shard, split
from tests.plan_checker import check as check_plans
from tests.test_runtime import Experts, Tower, built, mean_loss, token_batches
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
"""Rows and experts that divide over 1, 2, 3, 4, 6 and 12 devices."""


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


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
@pytest.mark.parametrize("zero", [0, 3])
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


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("attention", "others", "ways"),
    [
        ([0, 1], [2, 3], None),
        ([0, 1], [0, 1, 2, 3], None),
        ([0, 1], [2, 3, 4, 5], None),
        ([0, 1], [2, 3, 4], None),
        ([0, 1], [0, 1, 2], None),
        ([0, 1, 2, 3], [2, 3, 4], None),
        ([0, 1, 2], [2, 1], None),
        ([0, 1, 2], [3], None),
        ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9], 3),
        ([0, 1, 2, 3], [3, 2, 1, 0], 2),
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


@pytest.mark.parametrize("others", [[2, 3, 4, 5], [2, 3, 4], [1]], ids=["2-4", "2-3", "2-1"])
def test_memory_between_groups(others: list[int]) -> None:
    """What is cut into parts that do not lie side by side is copied: that is foretold."""
    model, batches = built(Experts, 2, EXPERTS), token_batches(ROWS, SEQ)
    program = compiled(model, experts([0, 1], others, None, 1), mean_loss, batches)
    check_plans(
        program.lowered.dag,
        program.plans,
        program.memory,
        models=program.models,
        optimizer_bytes=1.0,
    )
    (inputs, targets) = batches[0]
    with piper.launch(program) as trainer:
        trainer.step(*inputs, *targets)
        measured = trainer.measure_memory(*inputs, *targets)
    foretold = {d: memory.peak for memory in program.memory for d in memory.devices}
    for device, found in measured.items():
        assert 0.7 * foretold[device] < found.peak <= foretold[device], device


def test_experts_on_other_processes() -> None:
    model, batches = built(Experts, 2, EXPERTS), token_batches(ROWS, SEQ)
    program = compiled(model, experts([0, 1], [1, 2, 3], None, 3), mean_loss, batches)
    virtual = train(program, batches)
    with piper.launch(program, on="processes") as trainer:
        found = steps(trainer, batches)
    assert_same(found, virtual, 0.0)
