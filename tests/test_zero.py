"""State that is really divided: hybrid sharding, levels that differ, parameters of every kind, what
is communicated, and the memory that all of it takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.directives import Directive, place, replicate, split
from piper.strategies import mesh
from tests.test_runtime import Experts, mean_loss
from tests.training import (
    ULPS,
    Batch,
    Run,
    assert_same,
    compiled,
    pipeline,
    plain,
    shared_captures,
    train,
)

STEPS, CLIP = 3, 0.05


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Odd(nn.Module):
    """Layers whose parameters divide by nothing: of odd sizes, of no dimension, frozen, of another
    dtype, tied; and a region that has none."""

    def __init__(self, layers: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(layers))
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(())) for _ in range(layers))
        self.wide = nn.Parameter(torch.rand(3, dtype=torch.float64))
        self.head = nn.Linear(7, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.layers[1].weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("layer"):
            x = self.embed(tokens)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            with piper.annotate("layer"):
                x = x + torch.tanh(layer(x)) * scale
            with piper.annotate("nothing"):
                x = x * 0.5
        with piper.annotate("layer"):
            return self.head(x) * self.wide.sum().float()


@functools.cache
def odd(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    return Odd(tied=tied)


@functools.cache
def experts() -> nn.Module:
    torch.manual_seed(0)
    return Experts(4)


@functools.cache
def batches(parts: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(11, (2, 2 * parts, 4), generator=generator) for _ in range(STEPS)]
    return [((x,), (y,)) for x, y in found]


def check(model: nn.Module, strategy: Sequence[Directive], parts: int) -> piper.Program:
    """The strategy trains ``model`` as one device does, with ``parts`` microbatches."""
    program = compiled(model, strategy, mean_loss, batches(parts), clip_norm=CLIP)
    assert_same(train(program, batches(parts)), expected(model, parts), ULPS)
    return program


@functools.cache
def expected(model: nn.Module, parts: int) -> Run:
    return plain(model, mean_loss, batches(parts), microbatches=parts, clip_norm=CLIP)


# hybrid sharding


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("within", [1, 2, 4])
def test_state_divided_within_and_replicated_across(zero: int, within: int) -> None:
    strategy = mesh(dp=4, zero=zero, within=within, microbatches=2, bucket_mb=1e-3)
    program = check(experts(), strategy.directives, 8)
    assert {bucket.copies for bucket in program.buckets} == {4 // within}


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_under_pipelines(schedule: str, zero: int) -> None:
    strategy = mesh(
        pp=2, dp=4, zero=zero, within=2, schedule=schedule, microbatches=4, bucket_mb=1e-3
    )
    check(experts(), strategy.directives, 16)


@pytest.mark.parametrize(("dense", "theirs"), [(3, 0), (1, 3), (2, 1), (0, 2)])
def test_experts_have_a_level_of_their_own(dense: int, theirs: int) -> None:
    within = 2 if dense else None
    strategy = mesh(
        dp=4, ep=2, zero=dense, expert_zero=theirs, within=within, microbatches=2, bucket_mb=1e-3
    )
    check(experts(), strategy.directives, 8)


def test_levels_that_differ_by_layer() -> None:
    strategy = [
        split(parts=2),
        place({}, devices=range(4)),
        replicate({"layer": [0, 1]}, zero=3, within=2, bucket_mb=1e-3),
        replicate({"layer": [2, 3]}, zero=1, bucket_mb=1e-3),
        replicate({"layer": "-"}, zero=2, within=4, bucket_mb=1e-3),
    ]
    check(experts(), strategy, 8)


# parameters that several groups hold


def test_a_two_way_pipeline_divides_parameters_within_each_direction() -> None:
    strategy = mesh(pp=2, dp=2, zero=3, schedule="dualpipe", microbatches=4, bucket_mb=1e-3)
    program = check(experts(), strategy.directives, 8)
    assert {(bucket.within, bucket.copies) for bucket in program.buckets} == {(2, 2)}


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_every_kind(zero: int, tied: bool) -> None:
    strategy = pipeline([[0, 1], [2, 3]], 2, replicate({}, zero=zero, bucket_mb=1e-4), by=[3, 3])
    check(odd(tied), strategy, 4)


def test_groups_of_different_size_divide_what_they_share() -> None:
    """The tied embedding is on four devices and on two: it is divided in two."""
    strategy = pipeline([[0, 1, 2, 3], [4, 5]], 2, replicate({}, zero=3, bucket_mb=1e-4), by=[3, 3])
    program = compiled(odd(True), strategy, mean_loss, batches(8), clip_norm=CLIP)
    (tied,) = [b for b in program.buckets if "embed.weight" in b.parameters]
    assert (tied.within, tied.groups) == (2, ((0, 1, 2, 3, 4, 5),))
