"""Run with ``torchrun --nproc-per-node 2``: rank 0 compiles for both.

    one_compiles.py FOLDER

Each process writes to ``found.RANK`` what it trained and what it was told. Rank 1 compiles nothing
until it asks for a plan.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import piper
from piper import PiperError

RANK = int(os.environ.get("RANK", "0"))


class Tagger(nn.Module):
    """Takes any length and any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 7)
        self.register_buffer("unused", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            with piper.annotate("layer"):
                x = x + layer(x.cumsum(1)).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def loss(logits: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), y.flatten())


def rows(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"best": logits.argmax(-1), "spread": logits.std()}


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows * 100 + length)
    x, y = torch.randint(7, (2, rows, length), generator=draw)
    return x, y


def compiled(model: nn.Module, **mesh: Any) -> piper.Program:
    x, y = batch(8, 5)
    return piper.compile(
        model,
        piper.strategies.mesh(**mesh),
        inputs=(x,),
        targets=(y,),
        loss=loss,
        outputs=rows,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )


def programs() -> list[piper.Program]:
    torch.manual_seed(0)
    model = Tagger().double()
    pipeline = compiled(model, pp=2, schedule="1f1b", microbatches=2)
    return [pipeline, compiled(model, dp=2, zero=2, microbatches=2)]


def trained(trainer: piper.Trainer, other: piper.Program, folder: Path) -> dict[str, Any]:
    """Everything that a trainer does with its program."""
    found: dict[str, Any] = {"losses": []}

    def step(rows: int, length: int) -> None:
        found["losses"].append(float(trainer.step(*batch(rows, length)).loss))

    step(8, 5)
    step(8, 3)
    step(8, 5)
    found["outputs"] = dict(trainer.evaluate(*batch(8, 5)).outputs)
    trainer.save(folder / "state")
    trainer.switch(other)
    step(8, 5)
    trainer.load(folder / "state")
    trainer.save(folder / "later", background=True)
    step(8, 5)
    own = trainer.rows
    x, y = batch(8, 5)
    found["losses"].append(float(trainer.step(x[own], y[own], rows=True).loss))
    trainer.export(folder / "model")
    return found | {"state": trainer.state_dict()}


@contextmanager
def told(words: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except PiperError as error:
        words[name] = f"{type(error).__name__}: {error}"


def is_compiled(program: piper.Program) -> bool:
    return "training_step" in vars(program)


def main(folder: Path) -> None:
    pipeline, replicas = programs()
    with piper.launch(pipeline, on="torchrun", shapes=1, timeout=60) as trainer:
        found = trained(trainer, replicas, folder)
        all_of = [pipeline, replicas, trainer.program]
        found["compiled"] = [is_compiled(program) for program in all_of]
    words: dict[str, str] = {}
    model = Tagger()
    with told(words, "an error"):
        compiled(model, dp=2, microbatches=3)
    if RANK == 1:
        found["text"] = pipeline.text()
    if RANK == 0:
        found["text"] = pipeline.text()
        compiled(model, dp=2)  # a program of one rank alone: from here on each compiles for itself
    after = compiled(model, dp=2, microbatches=2)
    with told(words, "other model"), piper.launch(after, on="torchrun", timeout=60) as trainer:
        trainer.step(*batch(8, 5))
        with told(words, "switch"):
            trainer.switch(compiled(nn.Sequential(model, nn.Tanh()), dp=2, microbatches=2))
        trainer.step(*batch(8, 5))
    torch.save(found | {"words": words, "after": is_compiled(after)}, folder / f"found.{RANK}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
