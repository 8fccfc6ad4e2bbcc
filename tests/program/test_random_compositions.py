"""Random models under random compositions of pipeline, data, tensor, sequence, context and expert
parallelism with ZeRO, schedules, remat, clipping, frozen parameters and bf16. Each composition is
refused with a reason, or trains to the numbers of the whole batch on one device.

``pytest tests/program/test_random_compositions.py -m slow -s --examples 10000 --first 7`` tries
500.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.cli.demo.moe import MoE, MoEConfig
from piper.strategies import mesh
from piper.strategies.directives import Directive, remat
from piper.strategies.mesh_strategy import FOLDED, LOOPED, STRAIGHT
from tests.training import Batch, Run, assert_same, compiled, plain, shared_captures, train

VOCAB, SEQ, STEPS, CLIP = 24, 8, 2, 0.05
CLOSE = 1e-11
DEVICES = 16
SCHEDULES = ("1f1b", "1f1b", *STRAIGHT, *FOLDED, *LOOPED)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    fused: bool
    bias: bool
    norm: str
    tied: bool
    layers: int = 4
    experts: int = 0
    """The number of experts; 0 for a dense model."""
    dropless: bool = False
    frozen: str = ""
    """A substring of the names of frozen parameters."""
    rotary: bool = False
    """Queries and keys are turned by their positions, as in Llama."""


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.width = shape.dim // shape.heads
        sizes = [n * self.width for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        if shape.fused:
            self.qkv = nn.Linear(shape.dim, sum(sizes), bias=shape.bias)
        else:
            self.q, self.k, self.v = (nn.Linear(shape.dim, n, bias=shape.bias) for n in sizes)
        self.sizes = sizes
        self.out = nn.Linear(shape.dim, shape.dim, bias=shape.bias)
        self.mlp = mixture(shape) if shape.experts else MLP(shape)
        norm = nn.RMSNorm if shape.norm == "rms" else nn.LayerNorm
        self.norms = nn.ModuleList(norm(shape.dim, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        parts = self.qkv(y).split(self.sizes, -1) if self.shape.fused else None
        q, k, v = (
            z.unflatten(-1, (-1, self.width)).transpose(1, 2)
            for z in (parts or (self.q(y), self.k(y), self.v(y)))
        )
        if self.shape.rotary:
            q, k = rotated(q), rotated(k)
        gqa = self.shape.heads != self.shape.kv_heads
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        y = self.mlp(self.norms[1](x))
        return x + (y[0] if self.shape.experts else y)


def rotated(x: Tensor) -> Tensor:
    """The two halves of each head, turned by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequency = 100 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device).unsqueeze(1) * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fused = shape.fused
        if shape.fused:
            self.gate_up = nn.Linear(shape.dim, 2 * shape.hidden, bias=shape.bias)
        else:
            self.gate, self.up = (
                nn.Linear(shape.dim, shape.hidden, bias=shape.bias) for _ in range(2)
            )
        self.down = nn.Linear(shape.hidden, shape.dim, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


def mixture(shape: Shape) -> nn.Module:
    """Experts that drop no token: without a capacity, or with capacity for all."""
    made = MoE(
        MoEConfig(
            vocab=VOCAB,
            dim=shape.dim,
            layers=1,
            heads=1,
            mlp_dim=shape.hidden,
            experts=shape.experts,
            capacity_factor=None if shape.dropless else float(shape.experts),
        )
    )
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, shape.dim)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.dim, VOCAB, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("embed"):
            x = self.embedding(tokens)
        for layer in self.layers:
            with piper.annotate("layer"):
                x = layer(x)
        with piper.annotate("head"):
            return self.head(x)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


@functools.cache
def model(shape: Shape, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = Model(shape).to(dtype)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    for name, p in made.named_parameters():
        if shape.frozen and shape.frozen in name:
            p.requires_grad_(False)
    return made


@functools.cache
def batches(rows: int, masked: bool) -> list[Batch]:
    """With ``masked``, some targets are ignored, and more of them in later rows."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS):
        x, y = torch.randint(VOCAB, (2, rows, SEQ), generator=generator)
        if masked:
            bound = torch.arange(rows).unsqueeze(1) * SEQ // rows
            y = y.masked_fill(torch.randint(SEQ, (rows, SEQ), generator=generator) < bound, -100)
        made.append(((x,), (y,)))
    return made


@functools.cache
def expected(shape: Shape, rows: int, masked: bool, clip: float | None) -> Run:
    whole = model(shape, torch.float64)
    return plain(whole, loss, batches(rows, masked), microbatches=1, clip_norm=clip)


@functools.cache
def expected_bf16(shape: Shape, rows: int, masked: bool, clip: float | None) -> Run:
    """A bf16 run on one device: plain PyTorch, with fp32 weights, rounds products differently."""
    given = batches(rows, masked)
    whole = model(shape, torch.float32)
    return train(
        compiled(whole, mesh().directives, loss, given, clip_norm=clip, precision="bf16"), given
    )


SHAPES = [
    Shape(4, 4, 16, 24, False, False, "rms", False),
    Shape(4, 2, 16, 24, False, True, "layer", True),
    Shape(4, 2, 16, 24, True, True, "rms", False, frozen="norms"),
    Shape(6, 2, 24, 18, False, False, "rms", True, frozen="layers.0."),
    Shape(2, 1, 8, 20, True, False, "layer", False),
    Shape(3, 3, 12, 15, False, True, "rms", False, frozen="embedding"),
    Shape(4, 4, 16, 8, False, False, "rms", False, experts=4),
    Shape(4, 2, 16, 8, False, True, "rms", False, experts=4, dropless=True),
    Shape(2, 2, 8, 8, True, False, "layer", True, experts=8, dropless=True, frozen="router"),
    Shape(4, 2, 8, 6, False, False, "layer", False, experts=6, frozen="experts"),
    Shape(4, 2, 16, 24, False, False, "rms", False, rotary=True),
    Shape(4, 4, 8, 16, True, False, "rms", True, rotary=True),
    Shape(4, 2, 8, 8, False, False, "rms", False, experts=4, dropless=True, rotary=True),
]
SUBSETS: list[list[str]] = [
    ["q", "k", "v", "out", "gate", "up", "down"],
    ["q", "k", "v", "out", "gate", "up", "down", "head"],
    ["gate", "up", "down"],
    ["q", "k", "v", "out"],
    ["q"],
    ["v", "down"],
    ["out"],
    ["up"],
    ["down"],
    ["head"],
]
ROWS = ("out", "down")


def parameters(shape: Shape, rng: random.Random) -> dict[str, int | str]:
    """Some of the weights, mostly sharded in the usual way."""
    chosen: dict[str, int | str] = {}
    for name in rng.choice(SUBSETS[:4] if rng.random() < 0.5 else SUBSETS):
        if shape.fused:
            name = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}.get(
                name, name
            )
        if (name == "head" and shape.tied) or (shape.experts and name in _MLP):
            continue
        style: int | str = "row" if name in ROWS else "column"
        if rng.random() < 0.05:
            style = rng.choice(["row", "column"])
        chosen[name if name == "head" else f"*.{name}"] = style
    if rng.random() < 0.1:
        chosen["embedding.weight"] = rng.choice([0, 1])
    if rng.random() < 0.1:
        chosen["layers.1.norms.?.weight"] = 0
    return chosen or {"*.out": "row"}


_MLP = ("gate", "up", "gate_up", "down")


@dataclass(frozen=True)
class Case:
    shape: Shape
    rows: int
    strategy: tuple[Directive, ...]
    masked: bool
    clip: float | None
    bf16: bool

    def __str__(self) -> str:
        how = f"masked={self.masked} clip={self.clip} bf16={self.bf16}"
        return f"{self.shape} of {self.rows} rows, {how}\n{piper.Strategy(self.strategy)}"


def drawn(rng: random.Random) -> Case | str:
    """A random case, or the reason why its mesh is impossible."""
    shape = rng.choice(SHAPES)
    pp, dp = rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 2, 4])
    tp, cp = rng.choice([1, 1, 2, 2, 4, 3]), rng.choice([1, 1, 1, 2, 2, 4])
    options: dict[str, Any] = {
        "schedule": rng.choice(SCHEDULES),
        "pp": pp,
        "dp": dp,
        "cp": cp,
        "tp": tp,
        "zero": rng.choice([0, 0, 1, 2, 3]),
        "microbatches": rng.choice([1, 2, 4, 4]) if pp == 1 else rng.choice([4, 4, 8]),
        "bucket_mb": rng.choice([25, 1e-3]),
        "layout": rng.choice(["pipeline-outer", "pipeline-inner"]),
    }
    if pp * dp * tp * cp > DEVICES:
        return f"more than {DEVICES} devices"
    if dp == 4 and rng.random() < 0.3:
        options["within"] = 2
    if tp > 1:
        options["parameters"] = parameters(shape, rng)
        options["sequence_parallel"] = rng.random() < 0.4
    if cp > 1:
        options["attention"] = rng.choice(["all_to_all", "all_gather"])
    if shape.experts:
        options["ep"] = rng.choice([1, 2, 2, 4])
        if rng.random() < 0.3:
            options["expert_zero"] = rng.choice([0, 1, 2, 3])
        if shape.dropless and rng.random() < 0.3:
            options["capacity"] = float(options["ep"])
    try:
        steps = list(mesh(**options).directives)
    except piper.DirectiveError as error:
        return str(error)
    if rng.random() < 0.3:
        where = {"layer": rng.randrange(4)} if rng.random() < 0.5 else {}
        steps = [remat(where, rng.choice(["all", "min-cut"])), *steps]
    return Case(
        shape,
        rows=rng.choice([16, 32]),
        strategy=tuple(steps),
        masked=rng.random() < 0.3,
        clip=rng.choice([None, CLIP]),
        bf16=rng.random() < 0.15,
    )


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


def outcome(case: Case | str) -> str:
    """The outcome of a case; an assertion fails if a trained result is wrong."""
    if isinstance(case, str):
        return f"no schedule: {case}"
    given = batches(case.rows, case.masked)
    precision = "bf16" if case.bf16 else "fp32"
    whole = model(case.shape, torch.float32 if case.bf16 else torch.float64)
    try:
        program = compiled(
            whole, case.strategy, loss, given, clip_norm=case.clip, precision=precision
        )
    except (piper.CaptureError, piper.DirectiveError) as error:
        return f"refused: {error}"
    run = train(program, given)
    if case.bf16:
        _assert_near(run, expected_bf16(case.shape, case.rows, case.masked, case.clip))
        return "trained in bf16"
    assert_same(run, expected(case.shape, case.rows, case.masked, case.clip), CLOSE)
    return "trained"


def _assert_near(run: Run, reference: Run) -> None:
    """Products are rounded to bf16: losses agree to about two digits."""
    for mine, theirs in zip(run.losses, reference.losses, strict=True):
        assert abs(float(mine) - float(theirs)) < 0.02 * abs(float(theirs))
    for mine, theirs in zip(run.norms, reference.norms, strict=True):
        assert abs(float(mine) - float(theirs)) < 0.1 * abs(float(theirs))


REFUSALS = (
    "numbers that work",
    "by=[",
    "does not divide over",
    "regions 'layer': at most 4",
)
"""The accepted reasons to refuse a composition."""


@pytest.mark.slow
def test_each_is_refused_or_trains_as_one_device(request: pytest.FixtureRequest) -> None:
    count = max(1, request.config.getoption("--examples") // 20)
    first = request.config.getoption("--first")
    outcomes: Counter[str] = Counter()
    wrong = []
    for number in range(first, first + count):
        case = drawn(random.Random(number))
        try:
            said = outcome(case)
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{number}: {type(error).__name__} {str(error)[:500]}\n{case}")
            continue
        if said.startswith("refused") and not any(cause in said for cause in REFUSALS):
            wrong.append(f"{number}: {said}\n{case}")
        outcomes[re.sub(r"\d+", "N", said)[-80:]] += 1
    for words, times in outcomes.most_common():
        print(times, words)
    assert not wrong, "\n\n".join(wrong)
    assert sum(outcomes[name] for name in ("trained", "trained in bf16")) > count / 3
