"""Batches whose shapes change from step to step: one program for each shape, one state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import PiperError, annotate
from tests.training import adamw, assert_same, compiled, pipeline, plain, steps

VOCAB, WIDTH = 7, 4


class Tagger(nn.Module):
    """Takes any length and any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            with annotate("layer"):
                x = x + layer(x.cumsum(1)).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch(rows: int, length: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    draw = torch.Generator().manual_seed(rows * 100 + length)
    x, y = torch.randint(VOCAB, (2, rows, length), generator=draw)
    return (x,), (y,)


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def program(model: nn.Module) -> piper.Program:
    how = {"optimizer": adamw, "scheduler": decaying}
    return compiled(model, pipeline([[0], [1]], 2), loss, [batch(8, 5)], **how)


@pytest.mark.parametrize("on", ["virtual", pytest.param("processes", marks=pytest.mark.slow)])
def test_shapes_that_change_from_step_to_step(on: str) -> None:
    """Different lengths and numbers of rows; the second step of a shape reuses its program."""
    model = Tagger().double()
    batches = [batch(8, 5), batch(8, 3), batch(8, 5), batch(4, 3), batch(8, 3)]
    how = {"optimizer": adamw, "scheduler": decaying}
    expected = plain(model, loss, batches, microbatches=2, **how)
    with piper.launch(program(model), on=on, shapes=2) as trainer:
        found = steps(trainer, batches)
        seen = trainer.program
        assert trainer.step(*batch(8, 3)[0], *batch(8, 3)[1]).learning_rates == (0.01 / 2**5,)
        trainer.evaluate(*batch(8, 5)[0], *batch(8, 5)[1])
        assert trainer.program is not seen
        assert trainer.steps == len(batches) + 1
    assert_same(found, expected, 1e-12)


def test_shapes_that_are_refused(tmp_path: Path) -> None:
    made = program(Tagger())
    with pytest.raises(PiperError, match="shapes=-1 must be a whole number"):
        piper.launch(made, shapes=-1)
    with piper.launch(made, shapes=1) as trainer:
        for words, rows, length in (
            (r"3 does not divide into 2 microbatches.*drop_last=True", 3, 5),
            ("", 4, 5),
            (re.escape("another shape again, and shapes=1 allows 1 beside"), 4, 6),
        ):
            x, y = batch(rows, length)
            if not words:
                trainer.step(*x, *y)
                continue
            with pytest.raises(PiperError, match=words):
                trainer.step(*x, *y)
    made.save(tmp_path / "program")
    how = {"source": made.source, "optimizer": adamw, "scheduler": decaying}
    loaded = piper.Program.load(tmp_path / "program", **how)
    with (
        piper.launch(loaded, shapes=1) as trainer,
        pytest.raises(PiperError, match="loaded from a folder cannot be compiled"),
    ):
        trainer.step(*batch(4, 5)[0], *batch(4, 5)[1])
