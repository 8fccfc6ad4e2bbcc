"""Frozen parameters, as in LoRA: they do not change, need no state, and change no loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.models import DenseConfig, DenseTransformer, lm_loss
from piper.strategies import mesh

STEPS, BATCH, PARTS = 3, 8, 4
STRATEGIES = {
    "1F1B": {"pp": 2, "microbatches": 4},
    "ZB-V, ZeRO-1": {"pp": 2, "dp": 2, "schedule": "zb-v", "microbatches": 4, "zero": 1},
    "ZeRO-2": {"dp": 2, "microbatches": 2, "zero": 2},
    "ZeRO-3": {"dp": 2, "microbatches": 2, "zero": 3},
    "tensor parallel": {"tp": 2, "microbatches": 4},
}
LONG = ("1F1B", "ZeRO-2", "tensor parallel")


class LoRA(nn.Module):
    """An adapter beside a frozen block."""

    def __init__(self, block: nn.Module, width: int, rank: int = 2) -> None:
        super().__init__()
        self.block = block
        self.down = nn.Parameter(torch.randn(width, rank))
        self.up = nn.Parameter(torch.zeros(rank, width))

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.block(x, *more) + x @ self.down @ self.up


def adapted() -> DenseTransformer:
    torch.manual_seed(0)
    config = DenseConfig(vocab=32, dim=16, layers=4, heads=2, mlp_dim=16, max_seq=4)
    model = DenseTransformer(config).requires_grad_(False)
    for block in model.layers:
        block.mlp_norm = LoRA(block.mlp_norm, config.dim)
    return model.double()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain(model: nn.Module, x: Tensor, y: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    losses = []
    for _ in range(STEPS):
        parts = zip(x.chunk(PARTS), y.chunk(PARTS), strict=True)
        found = [lm_loss(model(a), b) / PARTS for a, b in parts]
        for one in found:
            one.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(one.item() for one in found))
    return losses, model.state_dict()


@pytest.fixture(scope="module")
def model() -> DenseTransformer:
    return adapted()


@pytest.fixture(scope="module")
def captured(model: DenseTransformer) -> piper.Capture:
    x, y = batch()
    return piper.capture(model, inputs=(x,), targets=(y,), loss=lm_loss, optimizer=adamw)


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.randint(32, (2, BATCH, 4), generator=torch.Generator().manual_seed(1))
    return x, y


@pytest.mark.cases(fast=0)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in STRATEGIES],
)
def test_a_strategy_trains_what_is_not_frozen_as_one_device_does(
    model: DenseTransformer, captured: piper.Capture, name: str
) -> None:
    x, y = batch()
    program = captured.compile(mesh(**STRATEGIES[name]))
    with piper.launch(program) as trainer:
        losses = [trainer.step(x, y).loss.item() for _ in range(STEPS)]
        state = trainer.state_dict()
    expected, after = plain(model, x, y)
    assert losses == pytest.approx(expected, rel=1e-12)
    before = model.state_dict()
    for key, tensor in state.items():
        torch.testing.assert_close(tensor, after[key], rtol=1e-12, atol=1e-12)
        trained = key.endswith((".down", ".up"))
        assert torch.equal(tensor, before[key]) != trained, key


@pytest.mark.slow
def test_the_optimizer_holds_nothing_of_what_is_frozen(
    model: DenseTransformer, captured: piper.Capture
) -> None:
    (memory,) = captured.compile(mesh(dp=2, microbatches=2)).memory
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert trained < memory.parameters / 5
    assert 2 * trained <= memory.optimizer < 2.2 * trained


def test_what_is_frozen_after_compile_is_refused_by_launch() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    captured = piper.capture(
        model, inputs=(torch.ones(2, 2),), targets=(torch.ones(2, 2),), loss=nn.MSELoss()
    )
    program = captured.compile(mesh(dp=2))
    for layer, flag in ((model[0], False), (model[1], True)):
        layer.requires_grad_(flag)
        says = (
            rf"requires_grad of {0 + flag}\.bias \(and of 1 more\) is {flag} now .* compile again"
        )
        with pytest.raises(piper.PiperError, match=says):
            piper.launch(program)
        with pytest.raises(piper.PiperError, match=says):
            captured.compile(mesh(dp=1))
        layer.requires_grad_(not flag)
    piper.launch(program).close()
