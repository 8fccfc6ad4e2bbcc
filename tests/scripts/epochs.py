"""Three epochs over a shuffled loader with worker processes that augment at random.

    epochs.py FOLDER [STEP]

Writes the number and loss of each step, and of each evaluation, to ``FOLDER/log``; kills itself
after step STEP.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import piper
from piper.launch.trainer.step_result import StepResult
from tests.scripts import resumed

ROWS = 8 * resumed.ROWS
"""Eight steps an epoch."""


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Rows with noise that a worker draws anew each time."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(row)
        x, y = torch.randn(2, resumed.WIDTH, generator=draw)
        return x + 0.1 * torch.randn(resumed.WIDTH), y


class Log:
    """Writes what steps and evaluations give; kills its process after a step."""

    def __init__(self, path: Path, last: int | None) -> None:
        self._file = path.open("a", buffering=1)
        self._last = last

    def on_step(self, step: int, result: StepResult) -> None:
        self._file.write(f"{step} {float(result).hex()}\n")
        if step == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_evaluate(self, step: int, result: StepResult) -> None:
        self._file.write(f"evaluated {step} {float(result).hex()}\n")

    def on_end(self) -> None:
        self._file.close()


def train(program: piper.Program, folder: Path, last: int | None = None) -> None:
    torch.manual_seed(0)
    loader = DataLoader(Noisy(), resumed.ROWS, shuffle=True, num_workers=2)
    held_out = DataLoader(TensorDataset(*resumed.batch(90)), 3)
    with piper.launch(program) as trainer:
        trainer.fit(
            loader,
            epochs=3,
            evaluate=held_out,
            checkpoint=folder / "run",
            every=3,
            keep=2,
            resume=True,
            callbacks=[Log(folder / "log", last)],
            progress=False,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    train(resumed.compiled(), Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None)
