"""Trains every program of a folder under ``torchrun --nproc-per-node 4``.

    replay.py FOLDER

Each process writes beside the programs: ``numbers.RANK``, and ``refused.RANK`` with the error for a
program for another number of devices. The last program resumes from the state ``before`` and saves
the state ``after``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import piper
from tests.scripts.cases import ON_FOUR, ON_ONE, numbers


def main(folder: Path) -> None:
    rank = os.environ["RANK"]
    found = {}
    for number, (name, case) in enumerate(ON_FOUR.items()):
        program = case.load(folder / str(number))
        with piper.launch(program, on="torchrun", timeout=120) as trainer:
            last = number == len(ON_FOUR) - 1
            if last:
                trainer.load(folder / "before")
            found[name] = numbers(trainer)
            if last:
                trainer.save(folder / "after")
    torch.save(found, folder / f"numbers.{rank}")
    try:
        piper.launch(ON_ONE.load(folder / "wrong"), on="torchrun")
    except piper.PiperError as error:
        (folder / f"refused.{rank}").write_text(str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
