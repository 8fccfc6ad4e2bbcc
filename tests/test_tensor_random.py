"""Random models, meshes and sharded parameters under tensor parallelism: each is refused in words
that say why, or trains to the numbers of one device.

``pytest tests/test_tensor_random.py -m slow -s --examples 10000 --first 7`` tries 500.
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
from piper.directives import Directive, remat
from tests.tensor import tensor_mesh
from tests.training import Batch, Run, assert_same, compiled, plain, shared_captures, train

VOCAB, SEQ, STEPS, CLIP = 24, 8, 2, 0.05
CLOSE = 1e-11


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    fused: bool
    bias: bool
    norm: str
    tied: bool


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.width = shape.dim // shape.heads
        sizes = [n * self.width for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        if shape.fused:
            self.qkv = nn.Linear(shape.dim, sum(sizes), bias=shape.bias)
            self.gate_up = nn.Linear(shape.dim, 2 * shape.hidden, bias=shape.bias)
        else:
            self.q, self.k, self.v = (nn.Linear(shape.dim, n, bias=shape.bias) for n in sizes)
            self.gate, self.up = (
                nn.Linear(shape.dim, shape.hidden, bias=shape.bias) for _ in range(2)
            )
        self.sizes = sizes
        self.out = nn.Linear(shape.dim, shape.dim, bias=shape.bias)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=shape.bias)
        norm = nn.RMSNorm if shape.norm == "rms" else nn.LayerNorm
        self.norms = nn.ModuleList(norm(shape.dim, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        parts = self.qkv(y).split(self.sizes, -1) if self.shape.fused else None
        q, k, v = (
            z.unflatten(-1, (-1, self.width)).transpose(1, 2)
            for z in (parts or (self.q(y), self.k(y), self.v(y)))
        )
        gqa = self.shape.heads != self.shape.kv_heads
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        gate, up = self.gate_up(y).chunk(2, -1) if self.shape.fused else (self.gate(y), self.up(y))
        return x + self.down(F.silu(gate) * up)


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
def model(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    made = Model(shape).double()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return made


@functools.cache
def batches(rows: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(VOCAB, (2, rows, SEQ), generator=generator) for _ in range(STEPS)]
    return [((x,), (y,)) for x, y in found]


@functools.cache
def expected(shape: Shape, rows: int) -> Run:
    return plain(model(shape), loss, batches(rows), microbatches=1, clip_norm=CLIP)


SHAPES = [
    Shape(layers, heads, kv, dim, hidden, fused, bias, norm, tied)
    for layers, heads, kv, dim, hidden, fused, bias, norm, tied in (
        (4, 4, 4, 16, 24, False, False, "rms", False),
        (4, 4, 2, 16, 24, False, True, "layer", True),
        (4, 4, 2, 16, 24, True, True, "rms", False),
        (4, 6, 2, 24, 18, False, False, "rms", True),
        (4, 2, 1, 8, 20, True, False, "layer", False),
        (4, 3, 3, 12, 15, False, True, "rms", False),
    )
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
    """Some of the weights, mostly as one would shard them."""
    found: dict[str, int | str] = {}
    for name in rng.choice(SUBSETS[:4] if rng.random() < 0.5 else SUBSETS):
        if shape.fused:
            name = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}.get(
                name, name
            )
        if name == "head" and shape.tied:
            continue
        style: int | str = "row" if name in ROWS else "column"
        if rng.random() < 0.05:
            style = rng.choice(["row", "column"])
        found[name if name == "head" else f"*.{name}"] = style
    if rng.random() < 0.1:
        found["embedding.weight"] = rng.choice([0, 1])
    if rng.random() < 0.1:
        found["layers.1.norms.?.weight"] = 0
    return found or {"*.down": "row"}


@dataclass(frozen=True)
class Case:
    shape: Shape
    rows: int
    strategy: tuple[Directive, ...]

    def __str__(self) -> str:
        return f"{self.shape} of {self.rows} rows\n{piper.Strategy(self.strategy)}"


def drawn(rng: random.Random) -> Case | str:
    """A case, or why there is none."""
    shape = rng.choice(SHAPES)
    pp, dp = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    tp = rng.choice([2, 2, 2, 4, 3, 1])
    schedule = rng.choice(["1f1b", "1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipev"])
    options: dict[str, Any] = {
        "schedule": schedule,
        "pp": pp,
        "dp": dp,
        "tp": tp,
        "zero": rng.choice([0, 0, 1, 2, 3]),
        "microbatches": rng.choice([1, 2, 4, 4]) if pp == 1 else 4,
        "sequence": rng.random() < 0.4,
        "inner": rng.choice(["tp", "tp", "dp"]),
        "bucket_mb": rng.choice([25, 1e-3]),
        "by": "flops",
        "parameters": parameters(shape, rng),
    }
    try:
        steps = tensor_mesh(**options)
    except piper.DirectiveError as error:
        return str(error)
    if rng.random() < 0.3:
        where = {"layer": rng.randrange(4)} if rng.random() < 0.5 else {}
        steps = [remat(where, rng.choice(["all", "min-cut"])), *steps]
    return Case(shape, rng.choice([8, 16]), tuple(steps))


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


UNEVEN = "cannot share evenly; numbers that work"


def outcome(case: Case | str) -> str:
    """What becomes of a case; an assertion fails if that is wrong."""
    if isinstance(case, str):
        return f"no schedule: {case}"
    try:
        program = compiled(
            model(case.shape), case.strategy, loss, batches(case.rows), clip_norm=CLIP
        )
    except (piper.CaptureError, piper.DirectiveError) as error:
        return f"refused: {error}"
    assert_same(train(program, batches(case.rows)), expected(case.shape, case.rows), CLOSE)
    return "trained"


@pytest.mark.slow
def test_each_is_refused_or_trains_as_one_device(request: pytest.FixtureRequest) -> None:
    count = max(1, request.config.getoption("--examples") // 20)
    first = request.config.getoption("--first")
    found: Counter[str] = Counter()
    wrong = []
    for number in range(first, first + count):
        case = drawn(random.Random(number))
        try:
            said = outcome(case)
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{number}: {type(error).__name__} {str(error)[:500]}\n{case}")
            continue
        if said.startswith("refused") and UNEVEN not in said and "by=[" not in said:
            wrong.append(f"{number}: {said}\n{case}")
        found[re.sub(r"\d+", "N", said)[-80:]] += 1
    for words, times in found.most_common():
        print(times, words)
    assert not wrong, "\n\n".join(wrong)
    assert found["trained"] > count / 3
