"""The profiler on CUDA streams: events, kernels by node, overlap, simulation. Run by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.ir.plan.instructions import Verb
from piper.models import MoEConfig, MoETransformer, lm_loss
from piper.strategies import mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = MoEConfig(vocab=512, dim=512, layers=4, heads=8, mlp_dim=1024, experts=4, max_seq=256)


def program(strategy: piper.Strategy) -> tuple[piper.Program, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randint(0, CONFIG.vocab, (16, 256), device="cuda")
    found = piper.compile(
        MoETransformer(CONFIG),
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        device="cuda",
        precision="bf16",
    )
    return found, x


@pytest.fixture(scope="module")
def profiled() -> tuple[piper.Program, Any]:
    found, x = program(mesh(pp=2, dp=2, ep=2, schedule="dualpipev", microbatches=8, zero=1))
    with piper.launch(found, on="virtual") as trainer:
        for _ in range(3):
            trainer.step(x, x)
        return found, trainer.profile(x, x, steps=3, kernels=True)


def test_every_instruction_is_timed_by_events(profiled: tuple[piper.Program, Any]) -> None:
    found, profile = profiled
    assert len(profile.steps) == 3
    for step in profile.steps:
        for device, row in step.items():
            plan = found.plan_of(device)
            assert [one.pc for one in row] == list(range(len(plan.instructions)))
            assert all(one.end >= one.start for one in row)
    # waits hold: a computation starts after its inputs were computed
    for device, row in profile.measured.items():
        plan = found.plan_of(device)
        ends = {one.pc: one.end for one in row}
        for one in row:
            for other in plan.instructions[one.pc].waits:
                assert ends[other] <= one.start + 2e-6
    print(profile)


def test_kernels_carry_their_node(profiled: tuple[piper.Program, Any], tmp_path: Path) -> None:
    found, profile = profiled
    assert set(profile.kernels) == set(found.devices)
    matrix = [k for row in profile.kernels.values() for k in row if "gemm" in k.name.lower()]
    assert len(matrix) > 100
    for device, row in profile.kernels.items():
        plan = found.plan_of(device)
        spans = {one.pc: one for one in profile.measured[device]}
        inside = [
            spans[k.pc].start - 2e-3 <= k.start and k.end <= spans[k.pc].end + 2e-3
            for k in row
            if plan.instructions[k.pc].verb is Verb.COMPUTE
        ]
        assert sum(inside) >= 0.95 * len(inside)
    profile.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = [e for e in events if e.get("cat") == "kernel"]
    assert len(named) == sum(map(len, profile.kernels.values()))
    assert all(e["name"].startswith(e["args"]["node"]) for e in named)


def test_streams_overlap(profiled: tuple[piper.Program, Any]) -> None:
    """Instructions of different streams of one device run at the same time."""
    found, profile = profiled
    together = 0.0
    for device, row in profile.measured.items():
        plan = found.plan_of(device)
        for a in row:
            for b in row:
                one, other = plan.instructions[a.pc], plan.instructions[b.pc]
                if one.verb is Verb.COMPUTE and other.verb is Verb.COLLECTIVE:
                    together += max(0.0, min(a.end, b.end) - max(a.start, b.start))
    print(
        f"computed and communicated at once: {together * 1e3:.3f} ms of {profile.seconds * 1e3:.3f}"
    )
    assert together > 0


def test_a_profile_feeds_the_simulator(profiled: tuple[piper.Program, Any]) -> None:
    found, profile = profiled
    one = found.simulate(piper.Cluster.of("H200", 4), profile.recorded)
    assert one.seconds > 0
    compute = {d: busy.computing for d, busy in profile.busy.items()}
    print(one, compute)
