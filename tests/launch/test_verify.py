"""``verify``: programs that equal plain PyTorch, and where those part that do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.launch.verify import MIXED, Verification
from piper.strategies import mesh

WIDTH = 4
X, Y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0))


class ScaledGradient(torch.autograd.Function):
    """Scales the gradient by the number of rows that one device sees at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * grad.shape[0]


class Block(nn.Module):
    def __init__(self, extra: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return x + self.extra(torch.tanh(self.dropout(self.linear(x))))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def compiled(model: nn.Module, **axes: Any) -> piper.Program:
    axes = axes or {"pp": 2, "dp": 2, "zero": 2, "microbatches": 2}
    options: dict[str, Any] = {"loss": F.mse_loss, "optimizer": adamw, "clip_norm": 0.5}
    return piper.compile(model, mesh(**axes), inputs=(X,), targets=(Y,), **options)


def blocks(extra: Callable[[Tensor], Tensor] = lambda x: x) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(extra), Block(), nn.Linear(WIDTH, WIDTH))


def test_a_report_says_that_parts_are_in_fp32() -> None:
    report = Verification({"weight": 3e-7}, MIXED, torch.float64, steps=1, devices=2)
    assert report.equal
    assert "in fp64 with parts in fp32 (equal up to 1e-06), without dropout" in str(report)


def test_a_program_that_equals_plain_pytorch() -> None:
    model = blocks()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    report = piper.verify(compiled(model), steps=2)
    assert report.equal
    assert report.largest < 1e-12
    assert report.dtype is torch.float64
    assert {"loss of step 1", "gradient norm of step 0", "3.bias"} <= report.differences.keys()
    first, second = str(report).splitlines()
    assert first.startswith("equal up to reduction order: largest difference ")
    assert second == ("2 steps on 4 devices beside plain PyTorch on one, in fp64, without dropout")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model[0].dropout.p == 0.1  # type: ignore[index,union-attr]


@pytest.mark.parametrize(
    ("extra", "parted"),
    [
        pytest.param(lambda x: x * x.shape[0], "the forward of 1", marks=pytest.mark.slow),
        (ScaledGradient.apply, "the backward of 1"),
    ],
    ids=["forward", "backward"],
)
def test_where_a_model_that_counts_its_rows_parts(
    extra: Callable[[Tensor], Tensor], parted: str
) -> None:
    report = piper.verify(compiled(blocks(extra)), steps=1)
    assert not report.equal
    assert report.parted == parted
    assert report.largest > 0.01
    assert f"({report.where}); they part first in {parted}\n" in str(report)


def test_a_loss_that_is_not_a_mean_over_rows_is_warned_of_once() -> None:
    """By the program, and not again by each of those that it is compared with."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + (output.mean() - target.mean()) ** 2

    with pytest.warns(piper.PiperWarning, match="not linear in its sum or mean over rows"):
        program = piper.compile(
            nn.Linear(WIDTH, WIDTH), mesh(dp=2), inputs=(X,), targets=(Y,), loss=loss,
            optimizer=adamw,
        )  # fmt: skip
    with warnings.catch_warnings(action="error", category=piper.PiperWarning):
        assert not piper.verify(program, steps=1).equal


class Lowers(nn.Module):
    """A loss that has no fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = [torch.ones(WIDTH, WIDTH)]

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output @ self.weight[0], target)


@pytest.mark.slow
def test_the_models_own_precision_where_there_is_no_fp64() -> None:
    model = blocks()
    program = piper.compile(
        model, mesh(dp=2), inputs=(X,), targets=(Y,), loss=Lowers(), optimizer=adamw
    )
    report = piper.verify(program, steps=1)
    assert report.equal
    assert report.dtype is None
    assert "in the model's own precision" in str(report)


@pytest.mark.slow
def test_batches_of_the_user() -> None:
    program = compiled(blocks(), dp=2)
    assert piper.verify(program, steps=9, batches=[(X, Y), (Y, X)]).steps == 2
    with pytest.raises(piper.PiperError, match="batches= has no batch"):
        piper.verify(program, batches=[])


@pytest.mark.slow
def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    with pytest.raises(piper.PiperError, match=r"layer\[1\], which draws random numbers"):
        piper.verify(compiled(blocks(lambda x: F.dropout(x, 0.5))))
    program = compiled(blocks(), dp=2)
    program.save(tmp_path / "program")
    with pytest.raises(piper.PiperError, match="that was loaded has no model"):
        piper.verify(piper.Program.load(tmp_path / "program"))
    with pytest.raises(piper.PiperError, match="not a Sequential"):
        piper.verify(blocks())  # type: ignore[arg-type]
    with pytest.raises(piper.PiperError, match="steps=0 must be a whole number, at least 1"):
        piper.verify(program, steps=0)
    empty = piper.compile(
        blocks(), mesh(dp=2), inputs=(X.to("meta"),), targets=(Y,), loss=F.mse_loss, optimizer=adamw
    )
    with pytest.raises(piper.PiperError, match=r"inputs\[0\], which has no values"):
        piper.verify(empty)
