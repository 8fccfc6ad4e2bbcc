"""Steps with non-finite gradients: skipped, as if their batch did not exist, or an error."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import PiperError, annotate
from piper.strategies.directives import Directive, replicate
from tests.training import (
    Batch,
    Run,
    adamw,
    assert_same,
    compiled,
    data_parallel,
    one_f_one_b,
    pipeline,
    plain,
    shared_captures,
)

ROWS, WIDTH, STEPS = 16, 8, 5
BAD = {1: math.nan, 3: math.inf}
"""Steps whose batch has this number in one row."""


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("layer"):
                x = x + layer(x) * 0.1
        return x


@functools.cache
def net() -> nn.Module:
    torch.manual_seed(0)
    return Layers().double()


@functools.cache
def data() -> tuple[Batch, ...]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, STEPS, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    for step, number in BAD.items():
        x[step, ROWS - 1, 0] = number
    return tuple(((a,), (b,)) for a, b in zip(x, y, strict=True))


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def counted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    wanted = target > -0.5
    return torch.where(wanted, (output - target).square(), 0.0).sum(), wanted.sum()


STAGES = pipeline([[0], [1]], 2, *one_f_one_b(2, 2))


def zero(level: int) -> list[Directive]:
    return [*data_parallel(2, 2), replicate({}, zero=level)]


@pytest.mark.parametrize(
    ("strategy", "parts", "loss", "clip"),
    [
        (STAGES, 2, mean_loss, None),
        (zero(1), 4, counted_loss, None),
        pytest.param(zero(0), 4, mean_loss, 0.1, marks=pytest.mark.slow),
        pytest.param(zero(2), 4, mean_loss, None, marks=pytest.mark.slow),
        pytest.param(zero(3), 4, counted_loss, 0.1, marks=pytest.mark.slow),
    ],
    ids=["stages", "zero-1-counted", "zero-0-clipped", "zero-2", "zero-3-counted-clipped"],
)
def test_a_skipped_step_leaves_everything_as_it_was(
    strategy: Sequence[Directive], parts: int, loss: Callable[..., Any], clip: float | None
) -> None:
    good = [batch for step, batch in enumerate(data()) if step not in BAD]
    options: dict[str, Any] = {"optimizer": adamw, "clip_norm": clip}
    expected = plain(net(), loss, good, microbatches=parts, **options)
    program = compiled(net(), strategy, loss, data(), on_nan="skip", **options)
    with piper.launch(program) as trainer:
        results = [trainer.step(x, y) for (x,), (y,) in data()]
        state = trainer.state_dict()
        assert trainer.steps == STEPS
    assert [i for i, result in enumerate(results) if result.skipped] == list(BAD)
    kept = [result for result in results if not result.skipped]
    norms = tuple(result.grad_norm for result in kept if result.grad_norm is not None)
    assert_same(Run(tuple(r.loss for r in kept), norms, state), expected, 1e-9)


def test_a_step_that_stops_says_so() -> None:
    program = compiled(net(), STAGES, mean_loss, data(), on_nan="stop")
    (good, bad) = (((x, y)) for (x,), (y,) in data()[:2])
    with piper.launch(program) as trainer:
        assert not trainer.step(*good).skipped
        before = trainer.state_dict()
        with pytest.raises(
            PiperError, match=r"gradients of step 2 are not finite .* changed no par"
        ):
            trainer.step(*bad, report=False)
        after = trainer.state_dict()
        assert all(torch.equal(after[name], x) for name, x in before.items())
        trainer.step(*good)


def test_without_the_option_nothing_waits() -> None:
    program = compiled(net(), STAGES, mean_loss, data())
    assert not program.settings.clip
    with piper.launch(program) as trainer:
        (x,), (y,) = data()[1]
        assert not trainer.step(x, y).skipped
    with pytest.raises(PiperError, match="on_nan='raise' must be 'skip' or 'stop', or None"):
        compiled(net(), STAGES, mean_loss, data(), on_nan="raise")
