"""Pipelines, data and expert parallelism and ZeRO composed, with clipped gradients: every
composition that fits on eight devices trains to the numbers of one device. The default run takes
a few of them; ``-m "slow or not slow"`` takes all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from piper.strategies import mesh
from tests.runtime.test_runtime import Experts, mean_loss
from tests.training import ULPS, Batch, Run, assert_same, compiled, plain, shared_captures, train

LAYERS, STEPS, CLIP = 8, 3, 0.05


class Composition(NamedTuple):
    schedule: str
    pp: int
    dp: int
    ep: int
    zero: int

    @property
    def microbatches(self) -> int:
        """The smallest number that every schedule accepts."""
        return 2 * self.pp


def compositions() -> Iterator[Composition]:
    """Every composition that fits, such as DualPipeV with ZeRO-3."""
    sizes = (1, 2, 4)
    schedules = ("1f1b", "interleaved", "zb-v", "dualpipev")
    for made in itertools.starmap(
        Composition, itertools.product(schedules, sizes, sizes, sizes, range(4))
    ):
        if made.pp * made.dp <= 8 and made.dp % made.ep == 0:
            yield made


ALL = list(compositions())
ALWAYS = set(ALL[::41])


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


@functools.cache
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Experts(LAYERS)


@functools.cache
def batches(parts: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(11, (2, 2 * parts, 4), generator=generator) for _ in range(STEPS)]
    return [((x,), (y,)) for x, y in found]


@functools.cache
def expected(parts: int) -> Run:
    return plain(model(), mean_loss, batches(parts), microbatches=parts, clip_norm=CLIP)


def name(made: Composition) -> str:
    return f"{made.schedule}-pp{made.pp}-dp{made.dp}-ep{made.ep}-zero{made.zero}"


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    "made",
    [pytest.param(c, id=name(c), marks=() if c in ALWAYS else pytest.mark.slow) for c in ALL],
)
def test_it_trains_as_one_device(made: Composition) -> None:
    parts = made.microbatches * made.dp
    strategy = mesh(**made._asdict(), microbatches=made.microbatches, bucket_mb=1e-3)
    program = compiled(model(), strategy.directives, mean_loss, batches(parts), clip_norm=CLIP)
    assert_same(train(program, batches(parts)), expected(parts), ULPS)
