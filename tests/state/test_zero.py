"""Sharded state: hybrid sharding, mixed ZeRO levels, parameters of every kind, the communication,
and the memory."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.models import DenseConfig, DenseTransformer, lm_loss
from piper.strategies import mesh
from piper.strategies.directives import Directive, place, replicate, shard, split
from tests.runtime.test_runtime import Experts, mean_loss
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


def slow(*values: Any, id: str | None = None) -> Any:
    """Test parameters that run only with the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Odd(nn.Module):
    """Parameters that divide evenly over no group: of odd sizes, 0-dimensional, frozen, of another
    dtype, tied; and a region without parameters."""

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
    """``model`` under the strategy must train as on one device with ``parts`` microbatches."""
    program = compiled(model, strategy, mean_loss, batches(parts), clip_norm=CLIP)
    assert_same(train(program, batches(parts)), expected(model, parts), ULPS)
    return program


@functools.cache
def expected(model: nn.Module, parts: int) -> Run:
    return plain(model, mean_loss, batches(parts), microbatches=parts, clip_norm=CLIP)


# hybrid sharding


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("within", [slow(1), 2, slow(4)])
def test_state_divided_within_and_replicated_across(zero: int, within: int) -> None:
    strategy = mesh(dp=4, zero=zero, within=within, microbatches=2, bucket_mb=1e-3)
    program = check(experts(), strategy.directives, 8)
    assert {bucket.copies for bucket in program.buckets} == {4 // within}


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [
        slow("1f1b", 1),
        slow("1f1b", 2),
        ("1f1b", 3),
        slow("dualpipev", 1),
        ("dualpipev", 2),
        slow("dualpipev", 3),
        ("dualpipe", 1),
        slow("dualpipe", 2),
        slow("dualpipe", 3),
    ],
)
def test_hybrid_sharding_under_pipelines(schedule: str, zero: int) -> None:
    strategy = mesh(
        pp=2, dp=4, zero=zero, within=2, schedule=schedule, microbatches=4, bucket_mb=1e-3
    )
    check(experts(), strategy.directives, 16)


@pytest.mark.parametrize(("dense", "theirs"), [(3, 0), (1, 3), slow(2, 1), slow(0, 2)])
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


@pytest.mark.parametrize("schedule", ["dualpipe", slow("1f1b")])
def test_a_higher_level_never_shards_less(schedule: str) -> None:
    """Each direction of the pipeline, or each end of it, is one device, which cannot gather: the
    other state is sharded over both. 1f1b has a tied embedding at both ends."""
    model = experts() if schedule == "dualpipe" else odd(True)

    def made(zero: int) -> piper.Program:
        strategy = mesh(pp=2, zero=zero, schedule=schedule, microbatches=4, bucket_mb=1e-3)
        return compiled(model, strategy.directives, mean_loss, batches(4), clip_norm=CLIP)

    programs = [made(zero) for zero in (2, 3)]
    two, three = (max(memory.peak for memory in p.memory) for p in programs)
    assert three <= two
    assert_same(train(programs[-1], batches(4)), expected(model, 4), ULPS)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_every_kind(zero: int, tied: bool) -> None:
    strategy = pipeline([[0, 1], [2, 3]], 2, replicate({}, zero=zero, bucket_mb=1e-4), by=[3, 3])
    check(odd(tied), strategy, 4)


@pytest.mark.slow
def test_groups_of_different_size_divide_what_they_share() -> None:
    """The tied embedding is on four devices and on two: it is sharded in two."""
    strategy = pipeline([[0, 1, 2, 3], [4, 5]], 2, replicate({}, zero=3, bucket_mb=1e-4), by=[3, 3])
    program = compiled(odd(True), strategy, mean_loss, batches(8), clip_norm=CLIP)
    (tied,) = [b for b in program.buckets if "embed.weight" in b.parameters]
    assert (tied.within, tied.groups) == (2, ((0, 1, 2, 3, 4, 5),))
    assert_same(train(program, batches(8)), expected(odd(True), 8), ULPS)


# communication


@functools.cache
def stack() -> nn.Module:
    """Layers of equal size, and no other trained parameters."""
    torch.manual_seed(0)
    return Stack(4)


class Stack(nn.Module):
    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("layer"):
                x = torch.tanh(layer(x))
        return x


LAYER = 16 * 16 * 4
"""Bytes of one layer's parameters; a bucket holds one layer."""


def traffic(zero: int, devices: int, microbatches: int, **how: int) -> piper.Traffic:
    """The traffic of a step on a stack, one microbatch after another."""
    rows = [[{"MB": m, "PASS": p}] for m in range(microbatches) for p in ("F", "B")]
    strategy = piper.Strategy(
        [
            split(parts=microbatches),
            place({}, devices=range(devices)),
            replicate({}, zero=zero, bucket_mb=LAYER / 2**20, **how),
            piper.order(*rows),
        ]
    )
    x = torch.zeros(8 * microbatches, 16)
    program = piper.compile(
        stack(), strategy, inputs=(x,), targets=(x,), loss=nn.functional.mse_loss
    )
    (found,) = program.traffic
    return found


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("devices", [2, slow(4)])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_bytes_are_those_of_the_textbook(devices: int, microbatches: int) -> None:
    """With P bytes of parameters on n devices and M microbatches: 2P without ZeRO and with ZeRO-1;
    with ZeRO-2, P per microbatch for gradients, and P for parameters; all times (n - 1) / n."""
    whole = 4 * LAYER * (devices - 1) // devices
    found = [traffic(zero, devices, microbatches) for zero in range(4)]
    nbytes = [t.nbytes - sum(f.nbytes for f in t.flows if f.stream == "scalars") for t in found]
    # ZeRO-3: forwards gather four layers. In the backward the last layer is still gathered, and the
    # first layer's needs no parameters
    gathers = microbatches * (4 + 2)
    assert nbytes == [
        2 * whole,
        2 * whole,
        microbatches * whole + whole,
        microbatches * whole + gathers * whole // 4,
    ]


@pytest.mark.slow
def test_nothing_is_reduced_or_gathered_twice() -> None:
    counts = {
        zero: [traffic(zero, 2, 3).count(k) for k in ("all_reduce", "reduce_scatter", "all_gather")]
        for zero in range(4)
    }
    scalars = 2  # the loss and the norm
    assert counts == {
        0: [4 + scalars, 0, 0],
        1: [scalars, 4, 4],
        2: [scalars, 3 * 4, 4],
        3: [scalars, 3 * 4, 3 * (4 + 2)],
    }


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_copies_are_summed_once_a_step(zero: int) -> None:
    """Hybrid sharding: within a copy as with fewer devices; across copies a shard of P, once."""
    scalars = [f for f in traffic(0, 4, 3).flows if f.stream == "scalars"]
    found, within = traffic(zero, 4, 3, within=2), traffic(zero, 2, 3)
    for kind in ("reduce_scatter", "all_gather"):
        assert (found.of(kind), found.count(kind)) == (within.of(kind), within.count(kind))
    across = found.of("all_reduce") - sum(f.nbytes for f in scalars)
    assert across == 4 * LAYER // 2  # 2 (n - 1) / n of one half


def test_experts_are_reduced_over_their_replicas_only() -> None:
    """Experts are reduced among devices with the same experts: half the bytes, half the devices."""
    parts = [split(parts=2), place({}, devices=range(4))]
    rules = [replicate({"EP": "-"}, reduce_stream="dense"), replicate({"EP": "*"})]
    program = compiled(
        experts(), [*parts, *rules, shard({"EP": "*"}, ways=2)], mean_loss, batches(8)
    )
    inside = [b for b in program.buckets if b.ways == 2]
    assert {len(b.groups[0]) for b in inside} == {2}
    sent = {f.stream: f.nbytes for t in program.traffic for f in t.flows if f.kind == "all_reduce"}
    assert sent["reduce"] == sum(b.elements * 4 for b in inside)


# memory


@functools.cache
def decoder(layers: int, width: int, tokens: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    config = DenseConfig(vocab=16, dim=width, layers=layers, heads=2, mlp_dim=4 * width)
    return DenseTransformer(config), torch.zeros(16, tokens, dtype=torch.int64)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.cases(fast=0, slow=6)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("layers", "width", "tokens"),
    [pytest.param(8, 32, 2, id="state"), slow(4, 8, 32, id="activations")],
)
@pytest.mark.parametrize("schedule", ["1f1b", slow("dualpipev")])
def test_a_device_holds_what_was_predicted(
    zero: int, layers: int, width: int, tokens: int, schedule: str
) -> None:
    """Never more than the plan predicts, and not much less."""
    model, x = decoder(layers, width, tokens)
    strategy = mesh(
        pp=2, dp=2, zero=zero, schedule=schedule, microbatches=4, bucket_mb=width**2 * 64 / 2**20
    )
    program = piper.compile(
        model, strategy, inputs=(x,), targets=(x,), loss=lm_loss, optimizer=adam
    )
    with piper.launch(program, on="virtual") as trainer:
        trainer.step(x, x)
        measured = trainer.measure_memory(x, x)
    for memory in program.memory:
        for device in memory.devices:
            state = memory.parameters + memory.optimizer
            buffers = memory.at_peak[piper.MemoryKind.BUFFERS]
            assert measured[device].state <= state + buffers
            assert measured[device].state >= 0.99 * state
            assert 0.9 * memory.peak <= measured[device].peak <= memory.peak


@functools.cache
def deep() -> nn.Module:
    torch.manual_seed(0)
    return Stack(32)


@pytest.mark.slow
def test_divided_state_saves_what_theory_says() -> None:
    """16 bytes per parameter: with n devices 8 + 8/n, 4 + 12/n and 16/n of them, plus transient
    buffers of a layer or two of each kind."""
    x = torch.zeros(16, 16)
    found = {}
    for zero in range(4):
        strategy = mesh(pp=2, dp=4, zero=zero, microbatches=2, bucket_mb=LAYER / 2**20)
        program = piper.compile(
            deep(),
            strategy,
            inputs=(x,),
            targets=(x,),
            loss=nn.functional.mse_loss,
            optimizer=adam,
        )
        with piper.launch(program, on="virtual") as trainer:
            trainer.step(x, x)
            found[zero] = trainer.measure_memory(x, x)[0].peak
    held = 16 * LAYER // 4
    theory = [16 * held, (8 + 8 / 4) * held, (4 + 12 / 4) * held, 4 * held]
    beside = found[0] - theory[0]  # activations: equal for all
    for zero in (1, 2, 3):
        under_way = (found[zero] - beside - theory[zero]) / LAYER
        assert -1 <= under_way <= (1, 4, 5)[zero - 1]


@pytest.mark.slow
def test_recomputing_shows_in_the_breakdown() -> None:
    """A policy per region: recompute the whole layer, what is cheap, or nothing."""
    model, x = decoder(2, 8, 32)

    def saved(*policies: str) -> int:
        layers = [piper.remat({"layer": i}, policy) for i, policy in enumerate(policies)]
        strategy = piper.Strategy([piper.place({}, devices=[0]), *layers])
        program = piper.compile(model, strategy, inputs=(x,), targets=(x,), loss=lm_loss)
        return program.memory[0].at_peak[piper.MemoryKind.SAVED]

    none, some, every = (saved(*[policy] * 2) for policy in ("none", "min-cut", "all"))
    assert none > some > every
    assert every < saved("all", "none") < none


@pytest.mark.slow
def test_parameters_are_gathered_as_early_as_the_limit_allows() -> None:
    x = torch.zeros(4, 16)
    strategy = mesh(dp=2, zero=3, microbatches=2)

    def peak(limit: int | None) -> int:
        program = piper.compile(
            deep(),
            strategy,
            inputs=(x,),
            targets=(x,),
            loss=nn.functional.mse_loss,
            memory_limit=limit,
        )
        return program.memory[0].peak

    usual, most = peak(None), peak(10**9)
    assert usual < most
    assert peak(most - 1) < most
    assert peak(usual) == usual
    least = peak(usual - 1)
    assert least < usual
    with pytest.raises(piper.PiperError, match=r"not enough.*at instruction.*the largest holders"):
        peak(least - 1)


# reading and writing the state


@pytest.mark.slow
def test_state_comes_a_few_tensors_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("piper.launch.state.state_calls"), "_AT_ONCE", 40)
    strategy = pipeline([[0, 1], [2, 3]], 2, replicate({}, zero=3, bucket_mb=1e-4), by=[3, 3])
    program = compiled(odd(True), strategy, mean_loss, batches(4))
    with piper.launch(program, on="virtual") as trainer:
        whole = trainer.state_dict()
        streamed = list(trainer.stream_state())
        assert [name for name, _ in streamed] == list(whole)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in streamed)
        other = {name: torch.rand_like(tensor) for name, tensor in whole.items()}
        other["head.weight"] = other["embed.weight"]
        trainer.load_state_dict(other)
        assert all(torch.equal(x, other[name]) for name, x in trainer.state_dict().items())
