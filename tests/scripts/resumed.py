"""A run that may be killed at any moment and started again.

    resumed.py FOLDER LAUNCHER STEPS [background]

Writes the number and loss of each step to ``FOLDER/log.RANK`` and saves every third step in
``FOLDER/run``, with ``background`` in the background. There are two devices, or one for each rank
of torchrun. With ``FAULT_AT`` a rank has faults.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper

ROWS, WIDTH = 8, 16

if "FAULT_AT" in os.environ:
    import_module("tests.scripts.fault_at")


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


def options() -> dict[str, Any]:
    return {
        "loss": F.mse_loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9),
    }


def strategy(devices: int) -> piper.Strategy:
    return piper.Strategy([piper.place({}, devices=[*range(devices)]), piper.replicate({}, zero=1)])


def compiled(devices: int = 2, **other: Any) -> piper.Program:
    torch.manual_seed(0)
    x, y = batch(0)
    given = options() | other
    return piper.compile(Net(), strategy(devices), inputs=(x,), targets=(y,), **given)


def job() -> piper.Job:
    """For ``piper train``, on four devices."""
    torch.manual_seed(0)
    x, y = batch(0)
    return piper.Job(
        Net(),
        strategy=strategy(4),
        inputs=(x,),
        targets=(y,),
        batches=[batch(step) for step in range(8)],
        **options(),
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
    world = int(os.environ.get("WORLD_SIZE", "2"))
    main(
        compiled(world), Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), "background" in sys.argv
    )
