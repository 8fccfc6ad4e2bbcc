"""Five steps of training under many strategies, compared with plain PyTorch.

Results are equal bit for bit if nothing is summed over devices: every parameter is on one device,
and the backwards of the microbatches run in ascending order. Otherwise sums have another order, and
each tensor must be equal within 1e-6 (fp32) or 1e-12 (fp64) of its largest element.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import piper
from piper import DirectiveError, PiperError, annotate
from piper.ir.dag.facts import Model
from piper.models import (
    DenseConfig,
    DenseTransformer,
    MoEConfig,
    MoETransformer,
    lm_loss,
    lm_loss_sum,
)
from piper.runtime.comm.loopback import Loopback
from piper.runtime.executor import Executor, LoadedPlan
from piper.runtime.instructions.update import squares
from piper.strategies.directives import (
    Directive,
    order,
    partition,
    place,
    remat,
    replicate,
    shard,
    split,
)
from piper.strategies.directives.place import Place
from tests.hugging_face import DECODER, FAMILIES, GPT2
from tests.reference import Net, slices
from tests.strategies.test_properties import DIRECTIVE, Case, cases
from tests.training import (
    STEPS,
    ULPS,
    Batch,
    Optimizer,
    Run,
    adamw,
    assert_same,
    compiled,
    copies,
    data_parallel,
    gpipe,
    one_f_one_b,
    overlapped,
    pipeline,
    plain,
    sgd,
    shared_captures,
    single,
    steps,
    train,
    zero_bubble,
)

ROWS, SEQ, DIM, VOCAB = 48, 4, 7, 11
"""Odd sizes: a layer's parameters, of 49 and 7 elements, divide over no group of devices."""


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Tower(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        with annotate("embed"):
            x = self.embed(tokens)
        first = x
        for i, layer in enumerate(self.layers):
            with annotate("layer"):
                x = self.layer(i, layer, x, first)
        with annotate("head"):
            return self.head(x)

    def layer(self, i: int, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        return x + torch.tanh(layer(x))


class Experts(Tower):
    """After each layer, the tokens at position p of a sequence go to expert p. No row of the batch
    depends on another, so every split of the batch gives the same."""

    def __init__(self, layers: int = 2, experts: int = 4) -> None:
        super().__init__(layers)
        self.n = experts
        self.w = nn.ParameterList(torch.randn(experts, DIM, DIM) * 0.3 for _ in range(layers))
        self.b = nn.ParameterList(torch.randn(experts, 1, DIM) * 0.3 for _ in range(layers))

    def layer(self, i: int, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        x = x + torch.tanh(layer(x))
        rows = x.unflatten(1, (self.n, -1)).transpose(0, 1).flatten(1, 2)
        with annotate("EP"):
            rows = torch.tanh(torch.baddbmm(self.b[i], rows, self.w[i]))
        return x + rows.unflatten(1, (x.shape[0], -1)).transpose(0, 1).reshape(x.shape)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sum_and_count(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


@functools.cache
def token_batches(
    rows: int = ROWS, seq: int = SEQ, vocab: int = VOCAB, ignored: bool = False
) -> tuple[Batch, ...]:
    """A batch for each step; with ``ignored``, some targets are ignored, in some rows all."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        x, y = torch.randint(vocab, (2, rows, seq), generator=generator)
        if ignored:
            y[torch.rand(rows, seq, generator=generator) < 0.3] = -100
            y[: rows // 3, 1:] = -100
            y[3] = -100
        found.append(((x,), (y,)))
    return tuple(found)


@functools.cache
def built(make: Callable[..., nn.Module], *args: Any, dtype: torch.dtype = torch.float32) -> Any:
    """One cached model for all tests with the same arguments: no test may change it."""
    torch.manual_seed(0)
    return make(*args).to(dtype)


@functools.cache
def expected(model: nn.Module, microbatches: int, loss: Any = mean_loss, **options: Any) -> Run:
    """Plain training of ``model`` on the token batches."""
    ignored = loss is sum_and_count
    return plain(model, loss, token_batches(ignored=ignored), microbatches=microbatches, **options)


def check(
    model: nn.Module,
    strategy: Sequence[Directive],
    microbatches: int,
    *,
    tolerance: float = 0.0,
    loss: Any = mean_loss,
    **options: Any,
) -> piper.Program:
    """Train ``model`` under ``strategy``; it must equal plain training with ``microbatches``."""
    batches = token_batches(ignored=loss is sum_and_count)
    program = compiled(model, strategy, loss, batches, **options)
    reference = {k: v for k, v in options.items() if k in ("optimizer", "scheduler", "clip_norm")}
    assert_same(
        train(program, batches), expected(model, microbatches, loss, **reference), tolerance
    )
    return program


# pipelines: bit for bit

PIPELINES = {
    "one-device": pipeline([[0]], 8),
    "one-device-one-microbatch": pipeline([[0]], 1),
    "2-stages-1-microbatch": pipeline([[0], [1]], 1),
    "2-stages-2-microbatches": pipeline([[0], [1]], 2, *one_f_one_b(2, 2)),
    "2-stages-3-microbatches": pipeline([[0], [1]], 3, *gpipe(2, 3)),
    "2-stages-1f1b": pipeline([[0], [1]], 8, *one_f_one_b(2, 8)),
    "2-stages-gpipe-halves": pipeline([[0], [1]], 8, *gpipe(2, 8, halves=True)),
    "2-stages-zero-bubble": pipeline([[0], [1]], 8, *zero_bubble(2, 8)),
    "3-stages-unequal": pipeline([[0], [1], [2]], 8, *one_f_one_b(3, 8), by=[2, 1, 1]),
    "4-stages-1f1b": pipeline([[3], [1], [2], [0]], 8, *one_f_one_b(4, 8)),
    "4-stages-zero-bubble": pipeline([[0], [1], [2], [3]], 8, *zero_bubble(4, 8)),
    "4-stages-overlapped": pipeline([[0], [1], [2], [3]], 8, *overlapped(4, 8)),
    "4-stages-in-a-v": pipeline([[0], [1], [1], [0]], 8),
    "zero-3-alone": [*pipeline([[0], [1]], 8), replicate({}, zero=3)],
    "zero-2-tiny-buckets": [*pipeline([[0], [1]], 8), replicate({}, zero=2, bucket_mb=1e-5)],
}


@pytest.mark.cases(fast=2, slow=1)
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(name: str) -> None:
    strategy = PIPELINES[name]
    (parts,) = (d.parts for d in strategy if d.name == "split")
    check(built(Tower), strategy, parts, optimizer=adamw)


@pytest.mark.parametrize("name", ["4-stages-1f1b", "4-stages-zero-bubble", "4-stages-in-a-v"])
def test_messages_that_are_asked_for_early(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on gloo: receives start one computation earlier than in the plan."""
    begun: list[list[int]] = []
    load = Executor.load

    def recorded(self: Executor, *given: Any) -> LoadedPlan:
        loaded = load(self, *given)
        begun.append([op.pc for op in loaded.ops])
        return loaded

    monkeypatch.setattr(Loopback, "any_order", True)
    monkeypatch.setattr(Executor, "load", recorded)
    check(built(Tower), PIPELINES[name], 8, optimizer=adamw)
    assert any(pcs != sorted(pcs) for pcs in begun)


def test_the_model_itself_is_left_alone() -> None:
    model = built(Tower)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    check(model, pipeline([[0, 1], [2, 3]], 4), 8, tolerance=ULPS)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# stages x replicas x ZeRO: every case has the rows of eight microbatches


@pytest.mark.parametrize(
    ("devices", "microbatches", "zero"),
    [(2, 4, 0), (2, 4, 3), (4, 2, 1), (4, 2, 2), (8, 1, 0), (8, 1, 1), (8, 1, 2), (8, 1, 3)],
)
def test_replicas(devices: int, microbatches: int, zero: int) -> None:
    strategy = [*data_parallel(devices, microbatches), replicate({}, zero=zero)]
    check(built(Tower), strategy, 8, tolerance=ULPS)


@pytest.mark.parametrize(("devices", "zero"), [(3, 1), (3, 3), (6, 0), (6, 2)])
def test_groups_that_are_no_power_of_two(devices: int, zero: int) -> None:
    strategy = [*data_parallel(devices, 6 // devices), replicate({}, zero=zero, bucket_mb=5e-4)]
    check(built(Tower), strategy, 6, tolerance=ULPS)


PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("groups", "schedule", "zero"),
    [
        ([[0, 2], [1, 3]], gpipe(2, 4), 1),
        ([[0, 2], [1, 3]], zero_bubble(2, 4), 0),
        ([[0, 2], [1, 3]], zero_bubble(2, 4), 3),
        (PAIRS, one_f_one_b(4, 4), 0),
        (PAIRS, one_f_one_b(4, 4), 2),
        (PAIRS, overlapped(4, 4), 3),
        ([[0, 1], [2, 3], [2, 3], [0, 1]], zero_bubble(4, 4), 2),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], one_f_one_b(2, 2), 1),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], one_f_one_b(2, 2), 3),
        ([[3, 1, 2, 0], [0, 1, 2, 3]], [], 2),
    ],
    ids=[
        "2x2-gpipe",
        "2x2-split",
        "2x2-split-scattered",
        "4x2-1f1b",
        "4x2-1f1b-scattered",
        "4x2-overlap",
        "v-split",
        "2x4-1f1b",
        "2x4-1f1b-scattered",
        "turned",
    ],
)
def test_stages_of_replicas(
    groups: Sequence[Sequence[int]], schedule: Sequence[Directive], zero: int
) -> None:
    parts = 8 // len(groups[0])
    strategy = [*pipeline(groups, parts, *schedule), replicate({}, zero=zero, bucket_mb=2e-4)]
    check(built(Tower), strategy, 8, tolerance=ULPS)


def test_levels_that_differ_between_stages() -> None:
    levels = [replicate({"PP": i}, zero=i, bucket_mb=1e-5) for i in range(4)]
    check(built(Tower), [*pipeline(PAIRS, 4, *one_f_one_b(4, 4)), *levels], 8, tolerance=ULPS)


@pytest.mark.parametrize(
    ("groups", "zero"),
    [
        ([[0], [1, 2], [3, 4, 5, 6]], 0),
        ([[0], [1, 2], [3, 4, 5, 6]], 3),
        ([[0, 1, 2, 3], [4, 5], [6]], 1),
        ([[0, 1, 2, 3], [4, 5], [6]], 2),
        ([[0, 1], [2], [3, 0]], 3),
        ([[0, 1, 2, 3], [1], [2, 3]], 2),
    ],
    ids=["1-2-4", "1-2-4-zero-3", "4-2-1", "4-2-1-zero-2", "2-1-2-shared", "4-1-2-within"],
)
def test_groups_of_different_size(groups: Sequence[Sequence[int]], zero: int) -> None:
    strategy = [*pipeline(groups, 2), replicate({}, zero=zero)]
    check(built(Tower), strategy, 8, tolerance=ULPS)


def two_way(groups: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> list[Directive]:
    """Two stages; the first half of four microbatches on ``groups``, the second on ``others``."""
    return [
        partition("layer", into="PP", parts=2),
        split(parts=4),
        *(place({"PP": i, "MB": [0, 1]}, devices=group) for i, group in enumerate(groups)),
        *(place({"PP": i, "MB": [2, 3]}, devices=group) for i, group in enumerate(others)),
    ]


@pytest.mark.parametrize(
    ("groups", "others", "zero"),
    [
        ([[0], [1]], [[1], [0]], 0),
        ([[0], [1]], [[1], [0]], 2),
        ([[0], [1]], [[2], [3]], 1),
        ([[0, 1], [2, 3]], [[2, 3], [0, 1]], 1),
        ([[0, 1], [2, 3]], [[4, 5], [6, 7]], 2),
        ([[0, 1], [2]], [[2], [0, 1]], 0),
    ],
    ids=["mirror", "mirror-zero-2", "apart", "mirror-of-pairs", "pairs-apart", "uneven-mirror"],
)
def test_two_ways(
    groups: Sequence[Sequence[int]], others: Sequence[Sequence[int]], zero: int
) -> None:
    strategy = [*two_way(groups, others), replicate({}, zero=zero)]
    check(built(Tower), strategy, 4 * len(groups[0]), tolerance=ULPS)


def test_two_ways_with_an_order_that_overlaps_them() -> None:
    """A small DualPipe: each device overlaps a forward of one way with a backward of the other."""
    rows = [
        order(
            {"PP": s, "MB": 0, "PASS": "F"},
            {"PP": s, "MB": 1, "PASS": "F"},
            {"PP": 1 - s, "MB": 2, "PASS": "F"},
            [{"PP": s, "MB": 0, "PASS": "B"}, {"PP": 1 - s, "MB": 3, "PASS": "F"}],
            {"PP": s, "MB": 1, "PASS": "BI"},
            {"PP": 1 - s, "MB": 2, "PASS": "B"},
            {"PP": s, "MB": 1, "PASS": "BW"},
            {"PP": 1 - s, "MB": 3, "PASS": "B"},
        )
        for s in (1,)
    ]
    strategy = [*two_way([[0], [1]], [[1], [0]]), replicate({}, zero=1), *rows]
    check(built(Tower), strategy, 4, tolerance=ULPS)


# experts


@pytest.mark.parametrize(("ways", "experts_zero"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 1)])
def test_experts_on_one_group(ways: int, experts_zero: int) -> None:
    strategy = [
        *data_parallel(4, 2),
        shard({"EP": "*"}, ways=ways),
        replicate({"EP": "*"}, zero=experts_zero, bucket_mb=5e-4),
        replicate({"EP": "-"}, zero=3 - experts_zero),
    ]
    check(built(Experts), strategy, 8, tolerance=ULPS)


TWO_FOURS = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("strategy", "zero"),
    [
        ([*pipeline([[0, 1], [2, 3]], 4, *one_f_one_b(2, 4)), shard({"EP": "*"})], 1),
        ([*pipeline([[0, 1], [2, 3]], 4, *zero_bubble(2, 4)), shard({"EP": "*"})], 2),
        ([*pipeline(TWO_FOURS, 2, *overlapped(2, 2)), shard({"EP": "*"}, ways=2)], 0),
        ([*pipeline(TWO_FOURS, 2, *overlapped(2, 2)), shard({"EP": "*"}, ways=2)], 3),
        ([*pipeline(TWO_FOURS, 2), shard({"EP": 1}, ways=2)], 3),
        ([*pipeline([[0, 1, 2, 3], [4, 5]], 2), shard({"EP": "*"}, ways=2)], 2),
        ([*pipeline([[0, 1], [4, 5, 6, 7]], 2), shard({"EP": "*"})], 1),
    ],
    ids=["2x2", "2x2-split", "ways-2", "ways-2-zero-3", "half-sharded", "4-2-ways-2", "2-4"],
)
def test_stages_of_experts(strategy: Sequence[Directive], zero: int) -> None:
    check(built(Experts), [*strategy, replicate({}, zero=zero)], 8, tolerance=ULPS)


@pytest.mark.parametrize(
    ("others", "zero"),
    [([[2, 3], [0, 1]], 0), ([[2, 3], [0, 1]], 2), ([[4, 5], [6, 7]], 1)],
    ids=["mirror", "mirror-zero-2", "apart"],
)
def test_experts_two_ways(others: Sequence[Sequence[int]], zero: int) -> None:
    strategy = [
        *two_way([[0, 1], [2, 3]], others),
        shard({"EP": "*"}),
        replicate({}, zero=zero),
    ]
    check(built(Experts), strategy, 8, tolerance=ULPS)


# models


class Tied(Tower):
    """The head uses the embedding's weight."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.head.weight = self.embed.weight


class Skip(Tower):
    """The last layer also reads the embedding's output, and the third the first's."""

    def layer(self, i: int, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        x = super().layer(i, layer, x, first)
        return x * first if i == len(self.layers) - 1 else x


class Frozen(Tower):
    """Only every other layer and the biases are trained."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.embed.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)


class Shared(Tower):
    """Layers 0 and 2 are the same module, and so are layers 1 and 3."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        for i in (2, 3):
            self.layers[i] = self.layers[i - 2]


class Mixed(Tower):
    """Layers of several dtypes."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.layers[0].double()
        self.layers[2].double()
        self.layers[3].weight.data = self.layers[3].weight.data.double()

    def layer(self, i: int, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        y = F.linear(x.to(layer.weight.dtype), layer.weight).float() + layer.bias.float()
        return x + torch.tanh(y)


class Normed(Tower):
    """A BatchNorm, with its counter and running averages, in layers 0 and 3."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        self.norms = nn.ModuleDict({i: nn.BatchNorm1d(DIM) for i in ("0", "3")})

    def layer(self, i: int, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        x = super().layer(i, layer, x, first)
        if str(i) in self.norms:
            x = self.norms[str(i)](x.flatten(0, 1)).view_as(x)
        return x


class Transposed(Tower):
    """Transposed weights: their memory order is not their index order."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        for layer in self.layers:
            layer.weight = nn.Parameter(layer.weight.detach().t())


PIPELINE = pipeline([[0], [1], [2], [3]], 8, *one_f_one_b(4, 8))
SPLIT = pipeline([[0], [1]], 8, *zero_bubble(2, 8))
REPLICAS = pipeline([[0, 1], [2, 3]], 4, *one_f_one_b(2, 4))


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("make", [Skip, Frozen, Mixed, Normed, Transposed])
def test_models_bit_for_bit(make: type[nn.Module]) -> None:
    strategy = SPLIT if make in (Skip, Frozen) else PIPELINE
    check(built(make), strategy, 8, optimizer=adamw)


@pytest.mark.parametrize(
    ("make", "zero"),
    [(Skip, 1), (Frozen, 0), (Frozen, 3), (Mixed, 1), (Mixed, 3), (Transposed, 2), (Transposed, 3)],
)
def test_models_on_replicas(make: type[nn.Module], zero: int) -> None:
    strategy = [*REPLICAS, replicate({}, zero=zero, bucket_mb=2e-4)]
    check(built(make), strategy, 8, tolerance=ULPS)


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (Tied, pipeline([[0], [0]], 8)),
        (Tied, PIPELINE),
        (Tied, [*REPLICAS, replicate({}, zero=2)]),
        (Tied, pipeline([[0], [1, 2], [3, 4, 5, 6]], 2)),
        (Shared, SPLIT),
        (Shared, [*REPLICAS, replicate({}, zero=1)]),
        (Shared, [*two_way([[0, 1], [2, 3]], [[2, 3], [0, 1]]), replicate({}, zero=1)]),
    ],
    ids=["one", "4", "zero-2", "1-2-4", "shared-split", "shared-zero-1", "shared-two-way"],
)
def test_weights_that_several_stages_use(
    make: type[nn.Module], strategy: Sequence[Directive]
) -> None:
    check(built(make), strategy, 8, tolerance=ULPS)


@pytest.mark.parametrize("make", [Tied, Shared])
def test_weights_that_several_regions_of_one_device_use(make: type[nn.Module]) -> None:
    """On one device nothing is summed over devices."""
    check(built(make), pipeline([[0]], 8), 8, optimizer=adamw)


def detached(self: Net, x: Tensor) -> Tensor:
    """A later region uses the weight of ``a`` again, without gradient."""
    with annotate("layer"):
        x = torch.tanh(self.a(x))
    with annotate("layer"):
        return self.b(x) + F.linear(x, self.a.weight.detach())


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [
        (pipeline([[0]], 8), 0.0),
        (pipeline([[0], [1]], 8), ULPS),
        ([*REPLICAS, replicate({}, zero=1)], ULPS),
    ],
    ids=["one", "stages", "replicas"],
)
def test_a_weight_that_is_used_again_without_gradient(
    strategy: Sequence[Directive], tolerance: float
) -> None:
    batches = [((batch["x"],), y) for batch, y in conditions(keywords=True)]
    torch.manual_seed(0)
    model = Net(detached, a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    program = compiled(model, strategy, F.mse_loss, batches)
    assert_same(
        train(program, batches), plain(model, F.mse_loss, batches, microbatches=8), tolerance
    )


def averaging(place_of_update: str, of: str, *, only_written: bool = False) -> Any:
    """Two layers and, at the named place, a buffer that averages (or copies) a weight."""

    def forward(self: Net, x: Tensor) -> Tensor:
        def update(here: str) -> None:
            if here == place_of_update:
                weight = getattr(self, of).weight.detach()
                with torch.no_grad():
                    self.ema.copy_(weight) if only_written else self.ema.lerp_(weight, 0.1)

        update("before")
        with annotate("layer"):
            update("first")
            x = torch.tanh(self.a(x))
        update("between")
        with annotate("layer"):
            update("second")
            x = self.b(x)
        update("after")
        return x

    return forward


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("where", "of", "only_written"),
    [
        ("between", "b", False),
        ("after", "a", False),
        ("before", "b", True),
        ("first", "b", True),
        ("second", "a", True),
        ("after", "a", True),
    ],
)
def test_a_buffer_that_follows_a_weight(where: str, of: str, only_written: bool) -> None:
    """Also where the buffer and the training of the weight are on different devices."""
    batches = [((batch["x"],), y) for batch, y in conditions(keywords=True)]
    torch.manual_seed(0)
    forward = averaging(where, of, only_written=only_written)
    model = Net(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6), ema=torch.zeros(6, 6))
    program = compiled(model, pipeline([[0], [1]], 4), F.mse_loss, batches)
    assert_same(train(program, batches), plain(model, F.mse_loss, batches, microbatches=4))


def turning(self: Net, x: Tensor) -> Tensor:
    with annotate("layer"):
        x = torch.tanh(self.a(x))
    with annotate("layer"):
        turned = torch.view_as_complex(x.view(-1, 3, 2)) * self.turn
        return torch.view_as_real(turned).flatten(1)


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [(pipeline([[0], [1]], 8), 0.0), ([*REPLICAS, replicate({}, zero=1)], ULPS)],
    ids=["stages", "replicas"],
)
def test_complex_weights(strategy: Sequence[Directive], tolerance: float) -> None:
    batches = [((batch["x"],), y) for batch, y in conditions(keywords=True)]
    torch.manual_seed(0)
    turn = nn.Parameter(torch.polar(torch.ones(3), torch.arange(3.0)))
    model = Net(turning, a=nn.Linear(6, 6), turn=turn)
    program = compiled(model, strategy, F.mse_loss, batches)
    assert_same(
        train(program, batches), plain(model, F.mse_loss, batches, microbatches=8), tolerance
    )


def test_batch_norm_on_several_devices_is_refused() -> None:
    with pytest.raises(DirectiveError, match=r"buffer 'norms\.0\.\w+'.*on several devices"):
        compiled(built(Normed), REPLICAS, mean_loss, token_batches())


def normed_twice(self: Net, x: Tensor) -> Tensor:
    for layer in (self.a, self.b):
        with annotate("layer"):
            x = torch.tanh(self.norm(layer(x)))
    return x


def test_a_batch_norm_of_two_regions_sees_them_in_turn() -> None:
    """On one device: the regions of one microbatch, then those of the next. An order that
    contradicts this is refused."""
    batches = [((batch["x"],), y) for batch, y in conditions(keywords=True)]
    torch.manual_seed(0)
    model = Net(normed_twice, a=nn.Linear(6, 6), b=nn.Linear(6, 6), norm=nn.BatchNorm1d(6))
    program = compiled(model, pipeline([[0], [0]], 4), F.mse_loss, batches)
    assert_same(train(program, batches), plain(model, F.mse_loss, batches, microbatches=4), ULPS)
    with pytest.raises(DirectiveError, match="on several devices"):
        compiled(model, pipeline([[0], [1]], 4), F.mse_loss, batches)
    forwards = [{"PP": s, "MB": m, "PASS": "F"} for s in range(2) for m in range(4)]
    with pytest.raises(DirectiveError, match="buffers change in the order of microbatches"):
        compiled(model, [*pipeline([[0], [0]], 4), order(*forwards)], F.mse_loss, batches)


def test_batch_norm_in_evaluation_mode_runs_on_several_devices() -> None:
    torch.manual_seed(0)
    model = Normed().eval()
    check(model, [*REPLICAS, replicate({}, zero=3)], 8, tolerance=ULPS)


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [
        (SPLIT, 0.0),
        ([*REPLICAS, replicate({}, zero=3)], ULPS),
        ([*two_way([[0, 1], [2, 3]], [[2, 3], [0, 1]]), replicate({}, zero=1)], ULPS),
    ],
    ids=["split", "zero-3", "two-way"],
)
def test_sums_and_counts_with_ignored_targets(
    strategy: Sequence[Directive], tolerance: float
) -> None:
    check(built(Tower), strategy, 8, loss=sum_and_count, tolerance=tolerance)


@pytest.mark.parametrize(
    ("policy", "schedule"),
    [("none", one_f_one_b(2, 8)), ("min-cut", zero_bubble(2, 8)), ("all", zero_bubble(2, 8))],
    ids=["none", "min-cut", "all"],
)
def test_recomputing(policy: str, schedule: Sequence[Directive]) -> None:
    strategy = [
        partition("layer", into="PP", parts=2),
        split(parts=8),
        remat({"layer": [0, 2]}, policy),
        place({"PP": 0}, devices=[0]),
        place({"PP": 1}, devices=[1]),
        *schedule,
    ]
    check(built(Tower), strategy, 8)


@pytest.mark.parametrize("policy", ["min-cut", "all"])
def test_recomputing_everywhere(policy: str) -> None:
    strategy = [*REPLICAS, replicate({}, zero=3)]
    check(built(Tower), strategy, 8, tolerance=ULPS, remat=policy)


class Scores(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.randn(VOCAB))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(logits * self.scale + self.shift, targets)


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [(PIPELINE, 0.0), ([*REPLICAS, replicate({}, zero=2)], ULPS)],
    ids=["1f1b", "zero-2"],
)
def test_a_loss_with_parameters(strategy: Sequence[Directive], tolerance: float) -> None:
    check(built(Tower), strategy, 8, loss=built(Scores), tolerance=tolerance)


class Dropping(Tower):
    def layer(self, i: int, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(layer(x)), 0.3, self.training)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [
        (SPLIT, 0.0),
        ([*PIPELINE[:2], remat({}, "all"), *PIPELINE[2:]], 0.0),
        ([*REPLICAS, replicate({}, zero=3)], ULPS),
        (two_way([[0, 1], [2, 3]], [[2, 3], [0, 1]]), ULPS),
    ],
    ids=["split", "recomputed", "zero-3", "two-way"],
)
def test_dropout_does_not_depend_on_the_strategy(
    strategy: Sequence[Directive], tolerance: float
) -> None:
    batches = token_batches()
    model = built(Dropping)
    program = compiled(model, strategy, mean_loss, batches, seed=7)
    assert_same(train(program, batches), dropped(7), tolerance)


@functools.cache
def dropped(seed: int) -> Run:
    return single(built(Dropping), mean_loss, token_batches(), microbatches=8, seed=seed)


def test_another_seed_drops_other_elements() -> None:
    assert not torch.equal(dropped(7).losses[0], dropped(8).losses[0])


class DroppingExperts(Experts):
    def layer(self, i: int, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        rows = x.unflatten(1, (self.n, -1)).transpose(0, 1).flatten(1, 2)
        with annotate("EP"):
            rows = F.dropout(torch.bmm(rows, self.w[i]), 0.3, self.training)
        return x + rows.unflatten(1, (x.shape[0], -1)).transpose(0, 1).reshape(x.shape)


def test_dropout_inside_experts_that_are_divided() -> None:
    batches, model = token_batches(), built(DroppingExperts)
    whole = data_parallel(2, 4)
    expected = train(compiled(model, whole, mean_loss, batches), batches)
    with suppress(DirectiveError):  # a refusal is as good as a correct result
        program = compiled(model, [*whole, shard({"EP": "*"})], mean_loss, batches)
        assert_same(train(program, batches), expected, ULPS)


# inputs


def conditioned(self: Net, x: Tensor, scale: Tensor, late: Tensor, power: float = 1.0) -> Tensor:
    """``late`` feeds only the third layer; the scalar ``scale`` feeds the first and the third."""
    with annotate("layer"):
        x = torch.tanh(self.a(x)) * scale
    with annotate("layer"):
        x = torch.tanh(self.b(x)) + x
    with annotate("layer"):
        x = torch.tanh(self.c(x)) + late * scale
    with annotate("layer"):
        return self.d(x) * power


@functools.cache
def conditions(keywords: bool) -> tuple[Batch, ...]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(STEPS):
        x, late, y = torch.randn(3, ROWS, 6, generator=generator)
        scale = torch.rand((), generator=generator) + 0.5
        named = {"late": late, "x": x, "scale": scale, "power": 0.5}
        found.append((named if keywords else (x, scale, late), (y,)))
    return tuple(found)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    ("strategy", "tolerance", "keywords"),
    [
        (PIPELINE, 0.0, False),
        ([*REPLICAS, replicate({}, zero=1)], ULPS, True),
        (pipeline([[0], [1, 2], [3, 4, 5, 6]], 2), ULPS, True),
    ],
    ids=["1f1b", "replicas-keywords", "1-2-4-keywords"],
)
def test_inputs_of_many_kinds(
    strategy: Sequence[Directive], tolerance: float, keywords: bool
) -> None:
    batches = conditions(keywords)
    model = built(four_linears)
    program = compiled(model, strategy, F.mse_loss, batches)
    reference = plain(model, F.mse_loss, batches, microbatches=8)
    assert_same(train(program, batches), reference, tolerance)


def four_linears() -> nn.Module:
    return Net(conditioned, **{name: nn.Linear(6, 6) for name in "abcd"})


# language models

DENSE = DenseConfig(vocab=VOCAB, dim=8, layers=2, heads=2, mlp_dim=6, max_seq=SEQ)
MOE = MoEConfig(
    vocab=VOCAB,
    dim=8,
    layers=2,
    heads=2,
    mlp_dim=6,
    max_seq=SEQ,
    experts=4,
    aux_loss_weight=0.1,
    tie_embeddings=True,
)


def lm(
    model: nn.Module,
    strategy: Sequence[Directive],
    loss: Any,
    tolerance: float,
    microbatches: int = 8,
    optimizer: Optimizer = sgd,
    **options: Any,
) -> None:
    batches = token_batches(ignored=loss is lm_loss_sum)
    program = compiled(model, strategy, loss, batches, optimizer=optimizer, **options)
    reference = plain(model, loss, batches, microbatches=microbatches, optimizer=optimizer)
    assert_same(train(program, batches), reference, tolerance)


def test_a_dense_transformer() -> None:
    strategy = pipeline([[0], [1]], 8, *zero_bubble(2, 8))
    lm(built(DenseTransformer, DENSE), strategy, lm_loss, 0.0, optimizer=adamw)


def test_a_mixture_of_experts() -> None:
    """With an auxiliary loss. The embedding, tied to the head, is on both stages, so only the
    experts use zero=3."""
    strategy = [
        *pipeline([[0, 1], [2, 3]], 4, *overlapped(2, 4)),
        shard({"EP": "*"}),
        replicate({"EP": "*"}, zero=3),
        replicate({"EP": "-"}, zero=1),
    ]
    lm(built(MoETransformer, MOE), strategy, lm_loss_sum, ULPS)


# gradient norm, clipping, optimizers


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    ("zero", "limit", "loss"),
    [(0, 0.3, mean_loss), (1, 0.3, sum_and_count), (2, 100.0, sum_and_count), (3, 0.3, mean_loss)],
)
def test_clipping_on_replicas(zero: int, limit: float, loss: Any) -> None:
    strategy = [*REPLICAS, replicate({}, zero=zero, bucket_mb=2e-4)]
    check(built(Tower), strategy, 8, clip_norm=limit, loss=loss, tolerance=ULPS)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (Tower, SPLIT),
        (Tower, two_way([[0, 1], [2, 3]], [[2, 3], [0, 1]])),
        (Tied, PIPELINE),
        (Tied, pipeline([[0], [1, 2], [3, 4, 5, 6]], 2)),
    ],
    ids=["split", "two-way", "tied", "tied-1-2-4"],
)
def test_clipping(make: type[nn.Module], strategy: Sequence[Directive]) -> None:
    """The norm counts tied weights once."""
    check(built(make), strategy, 8, clip_norm=0.3, tolerance=ULPS)


def test_clipping_of_experts() -> None:
    strategy = [*data_parallel(4, 2), shard({"EP": "*"}, ways=2), replicate({}, zero=2)]
    check(built(Experts), strategy, 8, clip_norm=0.3, tolerance=ULPS)


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": sgd,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": adamw,
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_bit_for_bit(name: str) -> None:
    check(built(Tower), pipeline([[0], [1]], 8), 8, optimizer=OPTIMIZERS[name])


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("sgd", 1),
        ("momentum", 3),
        ("nesterov", 2),
        ("adam", 0),
        ("adam", 3),
        ("adamw", 1),
        ("adamw", 2),
        ("rmsprop", 3),
        ("adagrad", 2),
    ],
)
def test_optimizers_on_replicas(name: str, zero: int) -> None:
    """In fp64, where the rounding error of a sum stays small through any optimizer."""
    model = built(Tower, dtype=torch.float64)
    strategy = [*REPLICAS, replicate({}, zero=zero)]
    check(model, strategy, 8, optimizer=OPTIMIZERS[name], tolerance=1e-9)


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=STEPS)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("strategy", "tolerance", "scheduler"),
    [(PIPELINE, 0.0, warm_up), ([*REPLICAS, replicate({}, zero=3)], ULPS, decay)],
    ids=["1f1b", "zero-3"],
)
def test_schedulers(
    strategy: Sequence[Directive], tolerance: float, scheduler: Callable[..., Any]
) -> None:
    check(built(Tower), strategy, 8, scheduler=scheduler, tolerance=tolerance)


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


class Matrices(Tower):
    """Without biases: Muon takes only matrices."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers)
        for module in (*self.layers, self.head):
            module.bias = None


def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.01)


@pytest.mark.cases(fast=3)
@pytest.mark.parametrize("zero", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("make", "optimizer"), [(Tower, adafactor), (Matrices, muon)])
def test_optimizers_that_look_at_whole_parameters(
    make: type[nn.Module], optimizer: Optimizer, zero: int
) -> None:
    """Under ZeRO they get whole tensors instead of slices."""
    if zero == 0:
        check(built(make), PIPELINE, 8, optimizer=optimizer)
    double = built(make, dtype=torch.float64)
    # Muon computes in bf16 internally
    tolerance = 1e-3 if optimizer is muon else 1e-9
    strategy = [*REPLICAS, replicate({}, zero=zero)]
    check(double, strategy, 8, optimizer=optimizer, tolerance=tolerance)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
        ({"optimizer": torch.optim.SparseAdam}, "SparseAdam"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau"),
        ({"scheduler": lambda optimizer: None}, "scheduler"),
    ],
    ids=["lbfgs", "sparse", "plateau", "none"],
)
def test_optimizers_and_schedulers_that_cannot_work_are_refused(
    options: dict[str, Any], words: str
) -> None:
    """At compile time, not after the first step."""
    with pytest.raises(PiperError, match=words):
        compiled(built(Tower), PIPELINE, mean_loss, token_batches(), **options)


def by_dimensions(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Weight decay for matrices only, as usual."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def test_groups_of_parameters_by_their_dimensions() -> None:
    """A slice is flat, and would be in another group: under ZeRO nothing is sliced then."""
    check(built(Tower), PIPELINE, 8, optimizer=by_dimensions)
    double = built(Tower, dtype=torch.float64)
    strategy = [*REPLICAS, replicate({}, zero=1)]
    check(double, strategy, 8, optimizer=by_dimensions, tolerance=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 3_000_001])
def test_the_norm_is_that_of_fp64(size: int, dtype: torch.dtype) -> None:
    """At any size and dtype: with fp32 alone the largest size would be off by 1e-4."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(n, generator=generator).add(1).to(dtype) for n in (size, 7)]
    gradients.append(torch.randn(40, 30, generator=generator).to(dtype).t())
    exact = sum(float(g.double().square().sum()) for g in gradients)
    assert abs(float(squares(gradients)) - exact) <= 1e-7 * exact


def test_the_norm_of_nothing() -> None:
    assert float(squares([])) == 0.0


def test_without_an_optimizer_nothing_changes() -> None:
    model = built(Tower)
    batches = token_batches()
    program = compiled(model, REPLICAS, mean_loss, batches, optimizer=None)
    found = train(program, batches)
    assert all(torch.equal(found.state[name], x) for name, x in model.state_dict().items())
    first = expected(model, 8).norms[0]
    assert abs(found.norms[0] - first) <= ULPS * first


# weights that are initialized at launch


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.normal_(0.0, 0.3, generator=generator)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "strategy",
    [
        PIPELINE,
        [*REPLICAS, replicate({}, zero=2)],
        [*two_way([[0], [1]], [[1], [0]]), replicate({}, zero=1)],
    ],
    ids=["1f1b", "zero-2", "two-way"],
)
def test_a_model_on_the_meta_device(strategy: Sequence[Directive]) -> None:
    """Every strategy starts with the same weights."""
    batches = token_batches()
    with torch.device("meta"):
        model = Tied()
    found = train(compiled(model, strategy, mean_loss, batches, init=fill, seed=3), batches)
    first = weights_of_meta()
    real = Tied()
    real.load_state_dict(first)
    assert_same(found, plain(real, mean_loss, batches, microbatches=8), ULPS)


@functools.cache
def weights_of_meta() -> dict[str, Tensor]:
    """The weights before any step."""
    with torch.device("meta"):
        model = Tied()
    batches = token_batches()
    program = compiled(model, [place({}, devices=[0])], mean_loss, batches, init=fill, seed=3)
    with piper.launch(program) as trainer:
        return trainer.state_dict()


def test_another_seed_gives_other_weights() -> None:
    with torch.device("meta"):
        model = Tied()
    batches = token_batches()
    program = compiled(model, [place({}, devices=[0])], mean_loss, batches, init=fill, seed=4)
    with piper.launch(program) as trainer:
        found = trainer.state_dict()
    assert not any(torch.equal(found[name], x) for name, x in weights_of_meta().items())


def test_a_model_on_the_meta_device_needs_init() -> None:
    with torch.device("meta"):
        model = Tower()
    program = compiled(model, PIPELINE, mean_loss, token_batches())
    with pytest.raises(PiperError, match="give init="):
        piper.launch(program)


# bf16


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [
        (SPLIT, 0.0),
        ([*REPLICAS, replicate({}, zero=1)], ULPS),
        ([*REPLICAS, replicate({}, zero=3)], ULPS),
        (two_way([[0, 1], [2, 3]], [[2, 3], [0, 1]]), ULPS),
    ],
    ids=["split", "zero-1", "zero-3", "two-way"],
)
def test_bf16(strategy: Sequence[Directive], tolerance: float) -> None:
    """Only one step where sums over devices are reordered: a weight that differs in its last bit
    may round to another bf16 value, and from then on the runs diverge."""
    model = built(Tower)
    batches = token_batches()[: STEPS if not tolerance else 1]
    program = compiled(model, strategy, loss_in_fp32, batches, precision="bf16")
    found = train(program, batches)
    assert {x.dtype for x in found.state.values()} == {torch.float32}
    assert_same(found, plain(model, loss_in_fp32, batches, microbatches=8, bf16=True), tolerance)


def loss_in_fp32(logits: Tensor, targets: Tensor) -> Tensor:
    assert logits.dtype == torch.bfloat16
    return mean_loss(logits.float(), targets)


@pytest.mark.slow
def test_bf16_experts_learn() -> None:
    strategy = [*data_parallel(4, 2), shard({"EP": "*"}, ways=2), replicate({}, zero=2)]
    model, batches = built(Experts), token_batches()
    program = compiled(model, strategy, loss_in_fp32, batches, precision="bf16", clip_norm=1.0)
    found = train(program, batches * 4)
    exact = plain(model, mean_loss, batches * 4, microbatches=8, clip_norm=1.0)
    assert torch.stack(found.losses).sub(torch.stack(exact.losses)).abs().max() < 0.02
    assert found.losses[-1] < found.losses[0] - 0.1


# models of the transformers library, tagged by module name


def llama() -> nn.Module:
    return FAMILIES["Llama"].make(vocab_size=VOCAB)


def gpt2() -> nn.Module:
    """The head is tied to the embedding."""
    return FAMILIES["GPT-2"].make(dropout=False, vocab_size=VOCAB)


def logits_loss(output: Any, targets: Tensor) -> Tensor:
    return mean_loss(output.logits, targets)


@pytest.mark.parametrize(
    ("make", "tags", "strategy", "tolerance"),
    [
        pytest.param(llama, DECODER, SPLIT, 0.0, marks=pytest.mark.slow),
        pytest.param(
            llama, DECODER, [*REPLICAS, replicate({}, zero=3)], ULPS, marks=pytest.mark.slow
        ),
        pytest.param(gpt2, GPT2, [*REPLICAS, replicate({}, zero=2)], ULPS, marks=pytest.mark.slow),
    ],
    ids=["llama-split", "llama-zero-3", "gpt2-zero-2"],
)
def test_transformers(
    make: Callable[[], nn.Module],
    tags: dict[str, str],
    strategy: Sequence[Directive],
    tolerance: float,
) -> None:
    pytest.importorskip("transformers")
    model = built(make)
    batches = [({"input_ids": x}, (y,)) for (x,), (y,) in token_batches()]
    program = compiled(model, strategy, logits_loss, batches, tags=tags)
    reference = plain(model, logits_loss, batches, microbatches=8)
    assert_same(train(program, batches), reference, tolerance)


# the random strategies of test_properties.py, on models with weights


class Drawn(nn.Module):
    """The model of a case that ``cases`` draws, in fp64.

    ``changing`` names the region with a buffer that depends on the order of microbatches;
    ``feature`` is one of ``FEATURES``.
    """

    SEQ = 12  # divides into 2, 3 and 4 experts
    ROWS = 720  # divisible by all numbers of microbatches and devices that are drawn

    def __init__(self, kind: str, layers: int, experts: int, changing: str, feature: str) -> None:
        super().__init__()
        self.kind, self.changing, self.n, self.feature = kind, changing, experts, feature
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB)
        self.w = nn.ParameterList(torch.randn(experts, DIM, DIM) * 0.3 for _ in range(layers))
        if kind != "moe":
            self.w = nn.ParameterList()
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            self.embed.requires_grad_(False)
            self.layers.requires_grad_(False)
        if changing in ("embed", "layer", "head"):
            self.register_buffer("seen", torch.ones(DIM))
        if feature == "added state":
            self.register_state_dict_post_hook(add_norm)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        with annotate("embed"):
            x = first = self.changed("embed", self.embed(tokens))
            mean = x.mean(-1, keepdim=True).expand_as(x) if self.feature == "expanded" else None
        for i, layer in enumerate(self.layers):
            with annotate("layer"):
                y = torch.tanh(layer(x))
                y = y * factor_of(self) if self.feature == "mode" else y
                x = x + y if mask is None else x + y * mask
                if self.kind == "moe":
                    rows = x.unflatten(1, (self.n, -1)).transpose(0, 1).flatten(1, 2)
                    with annotate("EP"):
                        rows = self.mixed(torch.tanh(torch.bmm(rows, self.w[i])))
                    x = x + rows.unflatten(1, (x.shape[0], -1)).transpose(0, 1).reshape(x.shape)
                if self.kind == "skip" and i == len(self.layers) - 1:
                    x = x + first
                x = self.changed("layer", x) if i == 0 else x
        with annotate("head"):
            return self.head(self.changed("head", x if mean is None else x * mean))

    def mixed(self, rows: Tensor) -> Tensor:
        """The experts' outputs, mixed if that is the feature: over the experts at one position, or
        over the rows of one expert."""
        if self.feature == "mixes experts":
            return rows * rows.softmax(0)
        return rows + 0.01 * rows.cumsum(1) if self.feature == "mixes rows" else rows

    def changed(self, region: str, x: Tensor) -> Tensor:
        """``x``, scaled by a running mean of ``x`` if this is the changing region."""
        if self.changing != region:
            return x
        self.seen.mul_(0.9).add_(0.1 * x.detach().abs().mean((0, 1)))
        return x * self.seen


class DrawnWithState(Drawn):
    """The same model with an extra state."""

    def get_extra_state(self) -> Tensor:
        return torch.tensor(len(self.layers))

    def set_extra_state(self, state: Tensor) -> None:
        assert int(state) == len(self.layers)


def factor_of(module: nn.Module) -> float:
    return 1.5 if module.training else 1.0


def add_norm(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[prefix + "norm"] = state[prefix + "head.weight"].detach().norm()


class DrawnLoss(nn.Module):
    """A loss whose buffer changes in every microbatch."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.counted = counted
        self.register_buffer("seen", torch.ones(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Any:
        self.seen.mul_(0.9).add_(logits.detach().abs().mean())
        return (sum_and_count if self.counted else mean_loss)(logits * self.seen, targets)


def weighted_pair(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A weighted loss, whose weights are fractions."""
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    weights = torch.where(targets.flatten() == -100, 0.0, targets.flatten() % 3 + 0.5).to(logits)
    return (each * weights).sum(), weights.sum()


def with_metric(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return mean_loss(logits, targets), logits.detach().mean()


def rates_by_dimensions(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Another learning rate for parameters that are not matrices."""
    vectors = [p for p in parameters if p.ndim < 2]
    matrices = [p for p in parameters if p.ndim > 1]
    return torch.optim.SGD([{"params": matrices}, {"params": vectors, "lr": 0.1}], lr=0.2)


def rates_by_place(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Another learning rate for the first parameter of the list."""
    rest = [{"params": parameters[1:]}] if parameters[1:] else []
    return torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, *rest], lr=0.2)


LOSSES = {"weighted": weighted_pair, "metric": with_metric}
GROUPINGS = {"groups by dimensions": rates_by_dimensions, "groups by place": rates_by_place}
_UNEVEN = r"optimizer SGD.* (does not treat each element|looks at all parameters)"
CAUSES = {
    "mixes experts": "region .* mixes experts",
    "mixes rows": "region .* mixes rows",
    "metric": "second value depends on a trained parameter",
    "groups by dimensions": _UNEVEN,
    "groups by place": _UNEVEN,
}
"""The error that a feature may cause; the other features are never a reason to refuse."""
FEATURES = (
    "",
    "mode",
    "expanded",
    "added state",
    *LOSSES,
    *GROUPINGS,
    "mixes experts",
    "mixes rows",
)


@dataclass(frozen=True)
class Setup:
    """A model, and how it is trained."""

    model: nn.Module
    loss: Any
    optimizer: Optimizer
    batches: tuple[Batch, ...]
    clip: float | None


def drawn(facts: Model, feature: str, clip: float | None) -> Setup:
    """The module that these facts describe, with a feature, and its loss."""
    tags = [name for chunk in facts.chunks for name in chunk.tags]
    changing = next((next(iter(c.tags)) for c in facts.chunks if c.changes), "")
    kind = "chain"
    if "EP" in tags:
        kind = "moe"
    elif "head.weight" not in facts.parameters:
        kind = "tied"
    elif not facts.parameters["embed.weight"].trained:
        kind = "frozen"
    elif facts.values[1].name == "inputs[1]":
        kind = "masked"
    elif any(len(c.inputs) == 2 for c in facts.chunks if "layer" in c.tags):
        kind = "skip"
    layers = len({chunk.tags["layer"] for chunk in facts.chunks if "layer" in chunk.tags})
    held = (p.shape[0] for name, p in facts.parameters.items() if name.startswith("experts."))
    experts = next(held) if kind == "moe" else 1
    own = "" if feature in LOSSES or feature in GROUPINGS else feature
    made = DrawnWithState if feature == "added state" else Drawn
    model = built(made, kind, layers, experts, changing, own, dtype=torch.float64)
    counted = facts.count is not None
    loss: Any = LOSSES.get(feature, sum_and_count if counted else mean_loss)
    if changing == "loss" and feature not in LOSSES:
        loss = built(DrawnLoss, counted, dtype=torch.float64)
    batches = drawn_batches(kind == "masked", counted)
    return Setup(model, loss, GROUPINGS.get(feature, sgd), batches, clip)


@functools.cache
def drawn_batches(masked: bool, counted: bool) -> tuple[Batch, ...]:
    found: list[Batch] = []
    generator = torch.Generator().manual_seed(3)
    for (x,), y in token_batches(Drawn.ROWS, Drawn.SEQ, ignored=counted)[:2]:
        mask = torch.rand(Drawn.ROWS, Drawn.SEQ, 1, generator=generator, dtype=torch.float64)
        found.append(((x, mask) if masked else (x,), y))
    return tuple(found)


@functools.cache
def drawn_run(setup: Setup, microbatches: int) -> tuple[Run, Tensor]:
    """Plain training, and the loss of an evaluation after it."""
    run = plain(
        setup.model,
        setup.loss,
        setup.batches,
        microbatches=microbatches,
        optimizer=setup.optimizer,
        clip_norm=setup.clip,
    )
    return run, evaluated(setup, run.state, microbatches)


def evaluated(setup: Setup, state: dict[str, Tensor], microbatches: int) -> Tensor:
    """The loss of the first batch in evaluation mode, with the trained state."""
    model, loss = copies(setup.model, setup.loss)
    model.load_state_dict({n: x for n, x in state.items() if n[:5] != "loss:"}, strict=False)
    if isinstance(loss, nn.Module):
        loss.load_state_dict({n[5:]: x for n, x in state.items() if n[:5] == "loss:"})
    model.eval()
    inputs, targets = setup.batches[0]
    sums, counts = [], []
    for x, y in zip(slices(inputs, microbatches), slices(targets, microbatches), strict=True):
        with torch.no_grad():
            found = loss(model(*x), *y)
        sums.append(found[0] if isinstance(found, tuple) else found)
        counts.append(found[1] if isinstance(found, tuple) else torch.ones(()))
    return torch.stack(sums).sum() / torch.stack(counts).sum()


def fitting(case: Case, feature: str) -> str:
    """``feature``, or none if the case cannot test it. With mixed rows, groups of one size equal
    one device with that many times more microbatches; groups of several sizes have no reference."""
    if not feature.startswith("mixes"):
        return feature
    if not any("EP" in chunk.tags for chunk in case.model.chunks):
        return ""
    return "" if feature == "mixes rows" and len(group_sizes(case)) > 1 else feature


def group_sizes(case: Case) -> set[int]:
    return {len(d.devices) for d in case.strategy.directives if isinstance(d, Place)}


def outcome(case: Case, feature: str) -> str:
    """ "refused", with an error that names a directive or the feature's fault, or "trained", to the
    numbers of plain PyTorch."""
    feature = fitting(case, feature)
    setup = drawn(case.model, feature, 0.3 if case.clip else None)
    try:
        program = compile_setup(case, setup)
    except PiperError as error:
        if feature in CAUSES and re.search(CAUSES[feature], str(error), re.S):
            return f"refused: {feature}"
        if DIRECTIVE.search(str(error)) and (not feature or refuses_without(case, setup)):
            return "refused"
        raise
    assert feature != "metric"
    with piper.launch(program, on="virtual") as trainer:
        found = steps(trainer, setup.batches)
        inputs, targets = setup.batches[0]
        loss = trainer.evaluate(*inputs, *targets).loss
    parts = max(group_sizes(case)) if feature == "mixes rows" else 1
    expected, evaluation = drawn_run(setup, program.microbatches * parts)
    assert_same(found, expected, 1e-12)
    torch.testing.assert_close(loss, evaluation, rtol=1e-12, atol=1e-12)
    return f"trained: {feature}" if feature else "trained"


def compile_setup(case: Case, setup: Setup) -> piper.Program:
    return compiled(
        setup.model,
        case.strategy.directives,
        setup.loss,
        setup.batches,
        optimizer=setup.optimizer,
        clip_norm=setup.clip,
    )


def refuses_without(case: Case, setup: Setup) -> bool:
    """Whether the strategy is also refused without the feature."""
    try:
        compile_setup(case, drawn(case.model, "", setup.clip))
    except PiperError:
        return True
    return False


@pytest.mark.slow
def test_random_strategies(request: pytest.FixtureRequest) -> None:
    """In fp64, every error larger than the rounding of a sum shows. ``--first`` sets the seed."""
    examples = max(1, request.config.getoption("--examples") // 24)
    outcomes: Counter[str] = Counter()

    @seed(request.config.getoption("--first"))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(), st.sampled_from(FEATURES))
    def try_one(case: Case, feature: str) -> None:
        outcomes[outcome(case, feature)] += 1

    try:
        try_one()
    finally:
        print(f"\n{dict(outcomes)}")
    trained = sum(n for what, n in outcomes.items() if what.startswith("trained"))
    assert trained >= examples * 0.3
