"""Statistics of gradients and activations by region equal those of plain PyTorch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.callbacks import RegionStatistics
from piper.launch.trainer.step_result import StepResult
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
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
def test_gradients_are_those_of_torch(strategy: piper.Strategy, loss: Any) -> None:
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


@pytest.mark.parametrize(
    "strategy",
    [
        mesh(pp=2, dp=2, zero=2, microbatches=2),
        pytest.param(mesh(tp=2, dp=2, zero=3), marks=pytest.mark.slow),
        pytest.param(mesh(cp=2, pp=2), marks=pytest.mark.slow),
    ],
    ids=["pp2-dp2-zero2", "tp2-dp2-zero3", "cp2-pp2"],
)
def test_activations_are_those_of_torch(strategy: piper.Strategy) -> None:
    """The redistributions of tensor parallelism are between what a region makes and what others
    read."""
    x, y = torch.randint(0, 32, (2, 8, 8))
    net = model()
    outputs: dict[str, Tensor] = {}
    regions = {"embed[0]": net.embedding, "head[0]": net.head}
    regions |= {f"layer[{i}]": layer for i, layer in enumerate(net.layers)}
    for name, module in regions.items():
        module.register_forward_hook(lambda *given, name=name: outputs.update({name: given[2]}))
    net(x)
    result = observed(model(), strategy, x, y)
    assert set(result.activations) == set(outputs)
    for region, statistics in result.activations.items():
        whole = outputs[region].detach()
        assert statistics.mean == pytest.approx(float(whole.mean()), rel=1e-6, abs=1e-12)
        assert statistics.rms == pytest.approx(float(whole.square().mean().sqrt()), rel=1e-9)
        assert statistics.largest == pytest.approx(float(whole.abs().max()), rel=1e-9)
        assert statistics.zeros == float((whole == 0).double().mean())


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("capacity", [None, 4.0], ids=["dropless", "capacity"])
def test_activations_of_experts(capacity: float | None) -> None:
    """The rows of an expert's output that nobody reads do not count."""
    x, y = torch.randint(0, 32, (2, 8, 8))

    def experts() -> MoETransformer:
        torch.manual_seed(0)
        sizes = {"vocab": 32, "dim": 16, "layers": 1, "heads": 2, "mlp_dim": 24, "max_seq": 8}
        return MoETransformer(MoEConfig(**sizes, experts=4, capacity_factor=capacity)).double()

    alone, sharded = (
        observed(experts(), strategy, x, y).activations
        for strategy in (mesh(dp=1), mesh(dp=2, ep=2))
    )
    assert list(alone) == ["embed[0]", "layer[0] EP[0]", "layer[0]", "head[0]"]
    assert list(sharded) == list(alone)
    for region, statistics in alone.items():
        found = dataclasses.astuple(sharded[region])
        assert found == pytest.approx(dataclasses.astuple(statistics), rel=1e-6, abs=1e-12)


def observed(net: nn.Module, strategy: piper.Strategy, x: Tensor, y: Tensor) -> StepResult:
    """The result of a step for which a callback asks for statistics."""
    program = piper.compile(net, strategy, inputs=(x,), targets=(y,), loss=lm_loss, optimizer=sgd)
    with piper.launch(program) as trainer:
        [result] = trainer.iterate([(x, y)], callbacks=[RegionStatistics(every=1)], progress=False)
    return result
