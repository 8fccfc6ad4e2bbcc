"""Averages of weights equal those of ``torch.optim.swa_utils``, under every way to shard them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import piper
from piper.models import DenseConfig, DenseTransformer, lm_loss
from piper.strategies import mesh

DECAY = 0.7


def model() -> DenseTransformer:
    torch.manual_seed(0)
    return DenseTransformer(
        DenseConfig(vocab=32, dim=16, layers=2, heads=2, mlp_dim=24, max_seq=8)
    ).double()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, 32, (2, 8, 8), generator=draw)) for _ in range(count)]  # type: ignore[misc]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def compiled(strategy: piper.Strategy, **changes: Any) -> piper.Program:
    x, y = batches(1)[0]
    given: dict[str, Any] = {"optimizer": piper.EMA(adamw, decay=DECAY), **changes}
    return piper.compile(model(), strategy, inputs=(x,), targets=(y,), loss=lm_loss, **given)


def plain(steps: int) -> tuple[DenseTransformer, Any]:
    net = model()
    optimizer = adamw(net.parameters())
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for x, y in batches(steps):
        lm_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
    return net, average.module


def assert_equal(state: dict[str, Tensor], expected: torch.nn.Module) -> None:
    for name, x in expected.state_dict().items():
        torch.testing.assert_close(state[name], x, rtol=1e-9, atol=1e-12)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(mesh(pp=2, dp=2, zero=2, microbatches=2), marks=pytest.mark.slow),
        mesh(tp=2, dp=2, zero=3),
        pytest.param(mesh(dp=2, zero=1), marks=pytest.mark.slow),
    ],
    ids=["pp2-dp2-zero2", "tp2-dp2-zero3", "dp2-zero1"],
)
def test_averages_are_those_of_torch(strategy: piper.Strategy, tmp_path: Path) -> None:
    """Also after a resume; the weights themselves train on undisturbed."""
    given = batches(4)
    program = compiled(strategy)
    with piper.launch(program) as trainer:
        for x, y in given[:2]:
            trainer.step(x, y)
        with trainer.averaged():
            assert_equal(trainer.state_dict(), plain(2)[1])
        trainer.save(tmp_path / "state")
    weights, average = plain(4)
    with piper.launch(program) as trainer:
        trainer.load(tmp_path / "state")
        for x, y in given[2:]:
            trainer.step(x, y)
        with trainer.averaged():
            loss = trainer.evaluate(*given[0]).loss
            made = trainer.model()
            trainer.export(tmp_path / "out")
            for wrong in (lambda: trainer.step(*given[0]), lambda: trainer.save(tmp_path / "x")):
                with pytest.raises(piper.PiperError, match=r"within trainer.averaged\(\)"):
                    wrong()
        torch.testing.assert_close(loss, lm_loss(average(given[0][0]), given[0][1]))
        assert_equal(made.state_dict(), average)
        assert_equal(trainer.state_dict(), weights)
    again = compiled(strategy, init=piper.weights(tmp_path / "out"))
    with piper.launch(again) as trainer:
        assert_equal(trainer.state_dict(), average)


@pytest.mark.slow
def test_memory_has_the_averages() -> None:
    usual, averaged = compiled(mesh(dp=2), optimizer=adamw), compiled(mesh(dp=2))
    sizes = [program.memory[0].optimizer for program in (usual, averaged)]
    assert sizes[1] - sizes[0] == averaged.memory[0].parameters
    assert len(averaged.buckets) == len(usual.buckets)


@pytest.mark.slow
def test_a_run_evaluates_averages_and_switches() -> None:
    given = batches(3)
    with piper.launch(compiled(mesh(dp=2, zero=1))) as trainer:
        summary = trainer.fit(given, evaluate=given[:1], averaged=True, progress=False)
        weights, average = plain(3)
        x, y = given[0]
        expected = lm_loss(average(x), y).item()
        assert summary.evaluations[0][1] == pytest.approx(expected)
        trainer.switch(compiled(mesh(pp=2, microbatches=2)))
        with trainer.averaged():
            assert_equal(trainer.state_dict(), average)
        assert_equal(trainer.state_dict(), weights)
        with pytest.raises(piper.PiperError, match="decay"):
            trainer.switch(compiled(mesh(dp=2), optimizer=piper.EMA(adamw, decay=0.5)))


@pytest.mark.slow
def test_what_is_wrong_is_refused() -> None:
    for wrong in (1, -0.1, "0.9"):
        with pytest.raises(piper.PiperError, match=r"must be a number from 0 to below 1"):
            piper.EMA(adamw, decay=wrong)  # type: ignore[arg-type]
    with pytest.raises(piper.PiperError, match="must be a function from a list"):
        piper.EMA(adamw(model().parameters()))  # type: ignore[arg-type]
    with (
        piper.launch(compiled(mesh(), optimizer=adamw)) as trainer,
        pytest.raises(piper.PiperError, match=r"are not averaged: compile it with optimizer=piper"),
    ):
        trainer.averaged().__enter__()
