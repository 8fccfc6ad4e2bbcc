"""A model under strategies for which every launcher must give the same bits.

The test, which trains on virtual devices, and the scripts under ``torchrun`` import these cases, so
that all processes have the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import annotate, partition, place, replicate, shard, split
from piper.models import DenseConfig, DenseTransformer
from piper.strategies import mesh
from piper.strategies.directives import Directive
from tests.scripts.faulty import Act, act
from tests.tensor import DENSE
from tests.training import compile_shared, data_parallel, one_f_one_b, pipeline, zero_bubble

ROWS, SEQ, DIM, VOCAB = 24, 4, 13, 431
"""Odd sizes: the embedding has 5603 numbers, more than one reduction message holds, and no group
size divides them."""


class Net(nn.Module):
    """embed, layers with experts, head, whose weights may be tied to the embedding's; the last
    layer may run the faulty operation ``act`` on the tokens."""

    def __init__(self, *, tied: bool = False, dropout: float = 0.0, asks: bool = False) -> None:
        super().__init__()
        self.asks = asks
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.experts = nn.ParameterList(torch.randn(SEQ, DIM, DIM) * 0.3 for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        with annotate("embed"):
            x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            with annotate("layer"):
                if self.asks and i == 3:
                    x = x + (act(tokens).unsqueeze(-1) / VOCAB).to(x.dtype)
                x = x + self.dropout(torch.tanh(layer(x)))
                if i % 2:
                    x = self.expert(self.experts[i // 2], x)
        with annotate("head"):
            return self.head(x)

    def expert(self, weight: Tensor, x: Tensor) -> Tensor:
        """The tokens at position p of a sequence go to expert p."""
        rows = x.transpose(0, 1)
        with annotate("EP"):
            rows = torch.tanh(torch.bmm(rows, weight))
        return x + rows.transpose(0, 1)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sum_and_count(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


Model = Callable[[], nn.Module]
adamw = functools.partial(torch.optim.AdamW, lr=0.01)
halving = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
ASKING: Model = functools.partial(Net, asks=True)
TIED: Model = functools.partial(Net, tied=True, dropout=0.2)
DECODER: Model = functools.partial(
    DenseTransformer, DenseConfig(vocab=VOCAB, dim=16, layers=2, heads=4, mlp_dim=24, max_seq=SEQ)
)
TIED_ASKING: Model = functools.partial(TIED, asks=True)


@dataclass(frozen=True)
class Case:
    """One model under one strategy."""

    strategy: Sequence[Directive]
    model: Model = Net
    loss: Callable[..., Any] = mean_loss
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self, path: Path) -> piper.Program:
        """The program of this case, loaded from ``path``."""
        scheduler = self.options.get("scheduler")
        model = source(self.model)
        return piper.Program.load(path, source=model, optimizer=adamw, scheduler=scheduler)

    def compile(self, **options: Any) -> piper.Program:
        x, y = batches()[0]
        return compile_shared(
            options.pop("model", source(self.model).model),
            piper.Strategy(self.strategy),
            inputs=(x,),
            targets=(y,),
            loss=self.loss,
            **{"optimizer": adamw, **self.options, **options},
        )


@functools.cache
def source(model: Model) -> piper.Source:
    """One model of each kind, which nothing changes."""
    torch.manual_seed(0)
    return piper.Source(model())


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of two steps; some targets are ignored."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        x, y = torch.randint(len(Act), VOCAB, (2, ROWS, SEQ), generator=generator)
        y[torch.rand(ROWS, SEQ, generator=generator) < 0.3] = -100
        found.append((x, y))
    return found


def acting(what: Act, row: int = 0) -> tuple[Tensor, Tensor]:
    """A batch with one row that triggers a fault."""
    x, y = batches()[0]
    x = x.clone()
    x[row, 0] = what
    return x, y


def numbers(trainer: piper.Trainer) -> dict[str, Tensor]:
    """All results of a short training."""
    found = {"loss before": trainer.evaluate(*batches()[0]).loss}
    for i, batch in enumerate(batches()):
        result = trainer.step(*batch)
        assert result.grad_norm is not None
        found |= {f"loss of step {i}": result.loss, f"norm of step {i}": result.grad_norm}
    found["loss after"] = trainer.evaluate(*batches()[0]).loss
    return found | trainer.state_dict()


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that are not equal bit for bit."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [name for name, x in found.items() if not _equal(x, expected[name])]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def two_way(groups: Sequence[Sequence[int]]) -> list[Directive]:
    """Half of the microbatches run through the stages in one direction, half in the other."""
    return [
        partition("layer", into="PP", parts=2),
        split(parts=4),
        *(place({"PP": i, "MB": [0, 1]}, devices=group) for i, group in enumerate(groups)),
        *(place({"PP": 1 - i, "MB": [2, 3]}, devices=group) for i, group in enumerate(groups)),
    ]


PAIRS = [[0, 2], [1, 3]]

ON_ONE = Case(pipeline([[0]], 2), ASKING)

ON_TWO: dict[str, Case] = {
    "stages": Case(pipeline([[0], [1]], 2), ASKING),
    "stages, tied weights, dropout": Case(pipeline([[0], [1]], 4, *zero_bubble(2, 4)), TIED_ASKING),
    "stages that share a device": Case(pipeline([[0], [0, 1]], 2)),
    "two ways, in bf16": Case(
        [*two_way([[0], [1]]), replicate({}, zero=1)], ASKING, options={"precision": "bf16"}
    ),
    "experts, ZeRO-3, counted, clipped": Case(
        [*data_parallel(2, 4), shard({"EP": "*"}), replicate({"EP": "-"}, zero=3)],
        ASKING,
        sum_and_count,
        {"clip_norm": 0.1},
    ),
}

ON_FOUR: dict[str, Case] = {
    "four stages": Case(pipeline([[3], [1], [2], [0]], 8, *one_f_one_b(4, 8))),
    **{
        f"replicas, ZeRO-{zero}": Case([*data_parallel(4, 2), replicate({}, zero=zero)])
        for zero in range(4)
    },
    **{
        f"three replicas and one, ZeRO-{zero}": Case(
            [*pipeline([[2, 0, 1], [3]], 2), replicate({}, zero=zero)]
        )
        for zero in range(4)
    },
    "stages of replicas, ZeRO-2, tied weights, dropout": Case(
        [*pipeline(PAIRS, 4, *one_f_one_b(2, 4)), replicate({}, zero=2, bucket_mb=1e-3)], TIED
    ),
    "stages of experts, counted, clipped, scheduled": Case(
        [*pipeline(PAIRS, 4, *zero_bubble(2, 4)), shard({"EP": "*"}), replicate({}, zero=1)],
        loss=sum_and_count,
        options={"clip_norm": 0.1, "scheduler": halving},
    ),
    "experts in two shares, ZeRO-3, in bf16": Case(
        [*data_parallel(4, 2), shard({"EP": "*"}, ways=2), replicate({}, zero=3)],
        options={"precision": "bf16"},
    ),
    "experts in turned groups": Case(
        [*pipeline([[3, 1], [2, 0]], 4), shard({"EP": "*"}), replicate({}, zero=1)]
    ),
    "two ways of pairs": Case([*two_way([[0, 1], [2, 3]]), replicate({}, zero=2)]),
    "a device of two groups": Case([*pipeline([[0, 1], [2], [3, 0]], 4), replicate({}, zero=3)]),
    "groups within a group": Case(
        [*pipeline([[0, 1, 2, 3], [1], [2, 3]], 2), replicate({}, zero=1)]
    ),
    "stages of tensor parallelism": Case(
        mesh(pp=2, tp=2, microbatches=4, schedule="1f1b", parameters=DENSE).directives, DECODER
    ),
    "replicas of context parallelism, ZeRO-1": Case(
        mesh(dp=2, cp=2, zero=1, microbatches=2, attention="all_gather").directives, DECODER
    ),
}
