"""Published failures of other systems under composed parallelism, as strategies: each equals plain
PyTorch on one device, or is refused. ``docs/correctness.md`` has the table. The issues were read as
excerpts; many are user reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.strategies import mesh
from tests.training import sgd

VOCAB, WIDTH, HEADS, ROWS, LENGTH = 12, 8, 4, 8, 6


class Attention(nn.Module):
    """Causal attention, with fewer key heads and with norms of queries and keys, if asked."""

    def __init__(self, key_heads: int, norms: bool) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.key_heads = key_heads
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, key_heads * size), nn.Linear(WIDTH, key_heads * size)
        self.norms = nn.ModuleList(nn.RMSNorm(size) if norms else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            y.view(rows, length, -1, WIDTH // HEADS).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        q, k = (norm(y) for norm, y in zip(self.norms, (q, k), strict=True))
        grouped = self.key_heads < HEADS
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(y.transpose(1, 2).reshape(rows, length, -1))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.bmm(rows, self.weights).relu()


class Mixture(nn.Module):
    """Each of four experts sees all rows; a router weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = self.router(flat).softmax(-1)
        made = self.experts(flat.expand(4, *flat.shape).contiguous())
        return torch.einsum("erd,re->rd", made, weights).view_as(x)


class Block(nn.Module):
    def __init__(self, key_heads: int, norms: bool, mixture: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(key_heads, norms)
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = Mixture() if mixture else nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class LM(nn.Module):
    """A language model, whose regions Piper finds."""

    def __init__(
        self,
        layers: int = 2,
        *,
        tied: bool = False,
        key_heads: int = HEADS,
        norms: bool = False,
        mixture: bool = False,
        unused: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(key_heads, norms, mixture) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        if unused:
            self.other = nn.Linear(WIDTH, WIDTH)
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Twice(nn.Module):
    """A weight that a block uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.w @ self.w


class Normalized(nn.Module):
    """Batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def shared_weight() -> nn.Module:
    body = (Twice() for _ in range(4))
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *body, nn.Linear(WIDTH, VOCAB))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Flatten(0, 1), Normalized())


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def smoothed(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten(), label_smoothing=0.1)


def decay_by_dimensions(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


TENSOR = {
    **dict.fromkeys(("*.q", "*.k", "*.v", "*.mlp.0"), "column"),
    **dict.fromkeys(("*.o", "*.mlp.2"), "row"),
}
ONE_KEY_HEAD = {name: how for name, how in TENSOR.items() if name not in ("*.k", "*.v")}


@dataclass(frozen=True)
class Case:
    sources: str
    """The issues and pull requests (PR), of Megatron-LM unless another repository is named."""
    axes: Mapping[str, Any]
    model: Callable[[], nn.Module] = LM
    loss: Callable[..., Tensor] = mean
    optimizer: Callable[..., torch.optim.Optimizer] = sgd
    clip: float | None = None
    ignored: float = 0.0
    """The share of targets that do not count, all at the beginning."""
    refused: str = ""


def lm(**options: Any) -> Callable[[], nn.Module]:
    return lambda: LM(**options)


CASES: dict[str, Case] = {
    "a tied head in a pipeline": Case(
        "uw-syfi/piper 13; 656, 7227, 7228; DeepSpeed PR 1252",
        {"pp": 2, "dp": 2, "zero": 1},
        lm(tied=True),
        clip=0.5,
    ),
    "tokens that do not count": Case(
        "torchtitan 2972; transformers PR 35438",
        {"pp": 2, "dp": 2, "microbatches": 2},
        ignored=0.4,
    ),
    "microbatches that do not divide": Case(
        "pytorch 126600", {"pp": 2, "microbatches": 3}, refused="Numbers that divide it: 1, 2, 4, 8"
    ),
    "a tied head in ZeRO-3": Case(
        "pytorch 176076; accelerate 4171; 6500; verl 7834",
        {"dp": 2, "zero": 3},
        lm(tied=True),
    ),
    "a weight used twice and a split backward": Case(
        "pytorch 180952, PR 181365", {"pp": 2, "schedule": "zb-v"}, shared_weight
    ),
    "zero bubble and replicas": Case(
        "pytorch 144530, PR 134052", {"pp": 2, "dp": 2, "schedule": "zb-h1", "zero": 2}
    ),
    "a pipeline and accumulation": Case(
        "torchtitan 1733; Megatron-DeepSpeed PR 42", {"pp": 2, "microbatches": 8}
    ),
    "ZeRO-2 and accumulation": Case(
        "DeepSpeed 1488; open-instruct PR 1498", {"dp": 2, "zero": 2, "microbatches": 4}
    ),
    "the norm of all stages and shards": Case(
        "torchtitan 596; pytorch 170862; NeMo-RL PR 3788; transformers PR 46113",
        {"pp": 2, "dp": 2, "tp": 2, "zero": 2, "parameters": TENSOR},
        clip=0.3,
    ),
    "the epsilon of clipping": Case("pytorch 149768", {"dp": 2}, clip=1e-5),
    "norms of queries and keys": Case(
        "NeMo-RL 3716; TransformerEngine 441",
        {"tp": 2, "parameters": TENSOR},
        lm(norms=True),
    ),
    "norms under sequence parallelism": Case(
        "1446; gpt-neox PR 1259; PaddleNLP PR 7610",
        {"pp": 2, "tp": 2, "parameters": TENSOR, "sequence_parallel": True},
    ),
    "one key head": Case(
        "bigcode Megatron-LM 35, 11, 37",
        {"tp": 2, "parameters": ONE_KEY_HEAD},
        lm(key_heads=1),
    ),
    "label smoothing over a sharded vocabulary": Case(
        "737, 7464, 7452", {"tp": 2, "parameters": {**TENSOR, "head": "column"}}, loss=smoothed
    ),
    "a shard of the sequence without tokens": Case("1764, 906", {"cp": 2}, ignored=0.5),
    "gradients of experts": Case(
        "DeepSpeed 6545, 5618; pytorch 160285; 5956",
        {"dp": 4, "ep": 2, "zero": 2},
        lm(mixture=True),
        clip=0.3,
    ),
    "layers that do not divide": Case(
        "1304, 468, 1584", {"pp": 2, "schedule": "interleaved"}, lm(layers=7)
    ),
    "more stages than layers": Case("1304", {"pp": 4}, lm(layers=3), refused="at most 3"),
    "unused parameters": Case("1150", {"dp": 2, "zero": 3}, lm(unused=True)),
    "frozen blocks": Case("PR 5285", {"pp": 2, "dp": 2, "zero": 3}, lm(frozen=True)),
    "decay by the number of dimensions": Case(
        "open_clip PR 358; fairscale 697",
        {"pp": 2, "dp": 2, "zero": 3},
        optimizer=decay_by_dimensions,
    ),
    "batch statistics on replicas": Case(
        "torchgpipe 14", {"dp": 2}, normalized, refused="would change it for its own share"
    ),
}


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize("name", CASES)
def test_it_equals_one_device_or_is_refused(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    tokens, targets = torch.randint(VOCAB, (2, ROWS, LENGTH))
    targets[:, : int(LENGTH * case.ignored)] = -100
    targets[0] = -100 if case.ignored else targets[0]

    def compiled() -> piper.Program:
        return piper.compile(
            model,
            mesh(**case.axes),
            inputs=(tokens,),
            targets=(targets,),
            loss=case.loss,
            optimizer=case.optimizer,
            clip_norm=case.clip,
        )

    if case.refused:
        with pytest.raises(piper.DirectiveError, match=case.refused):
            compiled()
        return
    report = piper.verify(compiled(), steps=2)
    assert report.equal, str(report)
    assert report.dtype is torch.float64
    # Adam enlarges the rounding errors of gradients that are zero but for them (keys' biases)
    assert report.largest < (1e-12 if case.optimizer is sgd else 1e-9)
