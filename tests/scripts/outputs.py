"""Evaluates the program in a folder under ``torchrun``; each process writes the outputs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import piper
from tests.capture.test_outputs import batch, net


def main(folder: Path) -> None:
    program = piper.Program.load(folder, source=piper.Source(net()))
    with piper.launch(program, on="torchrun") as trainer:
        torch.save(dict(trainer.evaluate(*batch()).outputs), folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
