"""Statistics of gradients by region equal those of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.models import DenseConfig, DenseTransformer, lm_loss
from piper.strategies import mesh
from tests.training import sgd

CONFIG = DenseConfig(vocab=32, dim=16, layers=2, heads=2, mlp_dim=24, max_seq=8)


def model() -> DenseTransformer:
    torch.manual_seed(0)
    return DenseTransformer(CONFIG).double()


def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.sum(), torch.tensor(losses.numel())


@pytest.mark.parametrize(
    ("strategy", "loss"),
    [
        (mesh(pp=2, dp=2, zero=2, microbatches=2), lm_loss),
        pytest.param(mesh(tp=2, dp=2, zero=3), counted, marks=pytest.mark.slow),
    ],
    ids=["pp2-dp2-zero2", "tp2-dp2-zero3"],
)
def test_they_are_those_of_torch(strategy: piper.Strategy, loss: Any) -> None:
    x, y = torch.randint(0, 8, (2, 8, 8))  # tokens from 8 on have no gradient
    net = model()
    lm_loss(net(x), y).backward()
    program = piper.compile(
        model(), strategy, inputs=(x,), targets=(y,), loss=loss, optimizer=sgd, clip_norm=0.01
    )
    with piper.launch(program) as trainer:
        found = trainer.gradients(x, y)
        assert trainer.steps == 1
    regions: dict[str, list[nn.Parameter]] = {
        "embed[0]": list(net.embedding.parameters()),
        "layer[0]": list(net.layers[0].parameters()),
        "layer[1]": list(net.layers[1].parameters()),
        "head[0]": [*net.norm.parameters(), *net.head.parameters()],
    }
    assert list(found) == list(regions)
    for region, parameters in regions.items():
        whole = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        assert found[region].norm == pytest.approx(float(whole.norm()), rel=1e-9)
        assert found[region].largest == pytest.approx(float(whole.abs().max()), rel=1e-9)
        assert found[region].zeros == float((whole == 0).double().mean())
    assert found["embed[0]"].zeros >= 24 / 32
