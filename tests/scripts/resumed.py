"""A run that may be killed at any moment and started again.

    resumed.py FOLDER LAUNCHER STEPS [background]

Writes the number and loss of each step to ``FOLDER/log.RANK`` and saves every third step in
``FOLDER/run``, with ``background`` in the background.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper

ROWS, WIDTH = 8, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("layer"):
                x = F.dropout(torch.tanh(layer(x)), 0.2, self.training)
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator)
    return x, y


def compiled(**options: Any) -> piper.Program:
    torch.manual_seed(0)
    x, y = batch(0)
    usual: dict[str, Any] = {
        "loss": F.mse_loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9),
    }
    return piper.compile(
        Net(),
        piper.Strategy([piper.place({}, devices=[0, 1]), piper.replicate({}, zero=1)]),
        inputs=(x,),
        targets=(y,),
        **(usual | options),
    )


def main(program: piper.Program, folder: Path, on: str, steps: int, background: bool) -> None:
    run: dict[str, Any] = {"checkpoint": folder / "run", "every": 3, "keep": 2, "resume": True}
    run["background"] = background
    rank = os.environ.get("RANK", "0")
    with (
        piper.launch(program, on=on) as trainer,
        (folder / f"log.{rank}").open("a", buffering=1) as log,
    ):
        for result in trainer.iterate(batch, steps=steps, progress=False, **run):
            log.write(f"{trainer.steps} {float(result.loss).hex()}\n")
        log.write("done\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(compiled(), Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), "background" in sys.argv)
