"""``captured.estimate``: the figures of the compiled and simulated step, without compiling it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.models import DenseConfig, DenseTransformer, MoEConfig, MoETransformer, lm_loss
from piper.strategies import mesh

CLUSTER = piper.Cluster.of("H100", 4, machines=2)


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


@cache
def plain() -> piper.Capture:
    with torch.device("meta"):
        model, x = Net(8), torch.empty(16, 32)
    return piper.capture(
        model, inputs=(x,), targets=(x,), loss=nn.functional.mse_loss,
        optimizer=torch.optim.AdamW, tags={"layers.*": "layer"}, precision="bf16", clip_norm=1.0,
    )  # fmt: skip


@cache
def dense() -> piper.Capture:
    config = DenseConfig(vocab=64, dim=32, layers=4, heads=4, mlp_dim=64, max_seq=16)
    with torch.device("meta"):
        model, x = DenseTransformer(config), torch.empty(16, 16, dtype=torch.long)
    return piper.capture(
        model, inputs=(x,), targets=(x,), loss=lm_loss, optimizer=torch.optim.AdamW
    )


@cache
def experts() -> piper.Capture:
    config = MoEConfig(vocab=64, dim=32, layers=4, heads=2, experts=4, mlp_dim=32, max_seq=8)
    with torch.device("meta"):
        model, x = MoETransformer(config), torch.empty(16, 8, dtype=torch.long)
    return piper.capture(
        model, inputs=(x,), targets=(x,), loss=lm_loss, optimizer=torch.optim.AdamW
    )


PLAIN: list[dict[str, Any]] = [
    {"pp": 2, "dp": 4, "zero": 3, "microbatches": 4},
    {"dp": 8, "zero": 2, "microbatches": 2},
    {"pp": 4, "dp": 2, "zero": 1, "schedule": "zb-h1", "microbatches": 8},
    {"pp": 2, "dp": 4, "schedule": "interleaved", "zero": 1, "bucket_mb": 0.01},
    {"pp": 4, "schedule": "dualpipev", "microbatches": 8, "layout": "pipeline-inner"},
    {"pp": 2, "dp": 2, "by": [3, 5], "microbatches": 4},
]
SHARDED: list[dict[str, Any]] = [
    {"dp": 2, "tp": 4, "sequence_parallel": True, "zero": 1},
    {"pp": 2, "tp": 2, "cp": 2, "zero": 3, "by": [1, 3]},
]


def same(captured: piper.Capture, strategy: piper.Strategy) -> None:
    estimate = captured.estimate(strategy, CLUSTER)
    program = captured.compile(strategy, costs=CLUSTER)
    simulation = program.simulate(CLUSTER)
    assert estimate.seconds == simulation.seconds
    assert estimate.peak == max(memory.peak for memory in program.memory) == simulation.peak
    assert estimate.fits == simulation.fits
    assert estimate.mfu == simulation.mfu
    assert estimate.exposed == pytest.approx(simulation.exposed)
    parts = estimate.compute, estimate.update, estimate.exposed, estimate.waiting
    assert min(parts) > -1e-12
    assert sum(parts) == pytest.approx(estimate.seconds)


@pytest.mark.parametrize("arguments", PLAIN, ids=str)
def test_an_estimate_is_the_compiled_and_simulated_step(arguments: dict[str, Any]) -> None:
    some = piper.remat({"layer": [0, 1, 2]}, "all")
    same(plain(), mesh(**arguments) + ([some] if "zero" in arguments else []))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", SHARDED, ids=str)
def test_so_it_is_of_sharded_regions(arguments: dict[str, Any]) -> None:
    same(dense(), mesh(**arguments))


@pytest.mark.slow
def test_so_it_is_of_experts() -> None:
    same(experts(), mesh(pp=2, dp=2, ep=2, zero=1))


def test_an_estimate_refuses_what_compile_refuses_and_says_what_does_not_fit() -> None:
    with pytest.raises(piper.DirectiveError, match="does not divide over 3 devices"):
        plain().estimate(mesh(dp=3), CLUSTER)
    with pytest.raises(piper.PiperError, match="devices up to number 15"):
        plain().estimate(mesh(dp=16), CLUSTER)
    with pytest.raises(piper.PiperError, match=r"must be a piper\.Cluster"):
        plain().estimate(mesh(dp=2), piper.Costs())  # type: ignore[arg-type]
    device = piper.Device("tiny", {torch.float32: 1e12}, memory=1000, bandwidth=1e12)
    estimate = plain().estimate(mesh(dp=2), piper.Cluster.of(device, 2))
    assert not estimate.fits
    assert "(too much)" in str(estimate)
    assert estimate.fullest.startswith("devices 0,1: peak")
