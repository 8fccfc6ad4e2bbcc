"""Reads initial weights under ``torchrun`` and prints whether they equal the files'; then gives one
process other files, and prints the errors of all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import piper
from tests.state.test_weights import ZERO3, wide


def main(folder: Path, other: Path) -> None:
    rank = os.environ["RANK"]
    expected = load_file(folder / "model.safetensors")
    with piper.launch(wide(folder, ZERO3), on="torchrun") as trainer:
        state = trainer.state_dict()
        same = all(torch.equal(state[key], x) for key, x in expected.items())
        print(f"{rank} {same}\n", end="", flush=True)  # one write: the ranks share the pipe
    try:
        piper.launch(wide(other if rank == "3" else folder, ZERO3), on="torchrun")
    except piper.PiperError as error:
        print(f"{rank} {error}\n", end="", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(Path, sys.argv[1:]))
