"""A value that depends on the batch alone and is larger than the batch, such as a mask, is computed
where it is used: no device sends it, and no layer saves it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.capture.model import capture
from piper.cli.demo.layers import lm_loss
from piper.ir.passes import Kind
from piper.strategies import mesh
from tests.training import Batch, Run, assert_same, compiled, plain, shared_captures, train

VOCAB, DIM, HEADS, LAYERS, ROWS, SEQ = 12, 8, 2, 3, 4, 32
TAGS = {"embed": "embed", "layers.*": "layer", "head": "head"}


@pytest.fixture(scope="module", autouse=True)
def _captures() -> Iterator[None]:
    with shared_captures():
        yield


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, seq, _ = x.shape
        heads = [p(x).view(rows, seq, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v)]
        y = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        out: Tensor = self.o(y.transpose(1, 2).reshape(rows, seq, DIM))
        return x + out


class Padded(nn.Module):
    """Takes tokens and a mask of those that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, kept: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1])
        mask = (position[None] <= position[:, None]) & kept.bool()[:, None, None, :]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.head(x)
        return logits


@functools.cache
def padded() -> nn.Module:
    torch.manual_seed(0)
    return Padded().double()


@functools.cache
def batches() -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randint(VOCAB, (2, ROWS, SEQ), generator=draw)
    kept = torch.ones(ROWS, SEQ, dtype=torch.int64)
    kept[1, -5:] = kept[3, -2:] = 0
    return [((x, kept), (y,))] * 2


@functools.cache
def expected() -> Run:
    return plain(padded(), lm_loss, batches(), microbatches=1)


def program(strategy: piper.Strategy) -> piper.Program:
    return compiled(padded(), list(strategy.directives), lm_loss, batches(), tags=TAGS)


@pytest.mark.slow
def test_layers_take_the_batch_and_share_one_program() -> None:
    (tokens, kept), targets = batches()[0]
    for policy in ("none", "min-cut"):
        found = capture(
            padded(),
            inputs=(tokens, kept),
            targets=targets,
            loss=lm_loss,
            tags=TAGS,
            remat=policy,
        )
        masks = [v for v in found.cut.values if len(v.spec.shape) == 4]
        assert masks == []
        first, second = found.programs[1:3]
        assert first is second
        saved = [first.specs[r] for r in first.specs if r.kind in (Kind.SAVED, Kind.SAVED_FOR_BW)]
        assert all(spec.shape[-2:] != (SEQ, SEQ) for spec in saved)


def test_a_pipeline_sends_activations_alone() -> None:
    made = program(mesh(pp=2, microbatches=2, schedule="1f1b"))
    assert [t.of("send") for t in made.traffic] == [ROWS * SEQ * DIM * 8] * 2
    assert_same(train(made, batches()), expected(), 1e-12)


COLUMNS = {"*.q": "column", "*.k": "column", "*.v": "column", "*.o": "row"}
ACTIVATION = ROWS * SEQ * DIM * 8


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(
    ("how", "kind", "sent"),
    [
        ({"tp": 2, "parameters": COLUMNS}, "tp", 2 * LAYERS * ACTIVATION),
        ({"cp": 2}, "cp", 8 * LAYERS * ACTIVATION // 4),
        ({"cp": 2, "attention": "all_gather"}, "cp", 4 * LAYERS * ACTIVATION // 2),
    ],
    ids=["tp", "cp", "cp-gathered"],
)
def test_shards_do_not_send_it_either(how: dict[str, Any], kind: str, sent: int) -> None:
    """Segments do not save it either: each segment that reads it computes it."""
    made = program(mesh(**how))
    flows = [f for f in made.traffic[0].flows if f.stream == kind]
    assert sum(f.nbytes for f in flows if f.nbytes > 64) == sent
    shapes = [value.shape for value in made.lowered.dag.model.values]
    assert all(shape[-2:] != (SEQ, SEQ) for shape in shapes)
    assert_same(train(made, batches()), expected(), 1e-12)
