"""Trains epochs and evaluates data sets under ``torchrun``.

    data_sets.py FOLDER

Each process writes what it finds to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import piper
from tests.launch.test_evaluation import SIZE, entropy, loader, program, rows
from tests.launch.test_loop import DATA, ROWS
from tests.scripts import resumed


def whole(trainer: piper.Trainer) -> dict[str, Any]:
    """The evaluation of 50 rows: in batches of any size, and in batches of own rows."""
    x, y = (x[: 2 * SIZE] for x in rows())
    own = [(x[i : i + SIZE][trainer.rows], y[i : i + SIZE][trainer.rows]) for i in (0, SIZE)]
    return {
        "any size": float(trainer.evaluate(loader(64, 50))),
        "whole": float(trainer.evaluate(x, y)),
        "own rows": float(trainer.evaluate(own, rows=True)),
    }


def fitted(trainer: piper.Trainer, folder: Path) -> dict[str, Any]:
    """Epochs with evaluations and checkpoints."""
    torch.manual_seed(0)
    summary = trainer.fit(
        DataLoader(DATA, ROWS, shuffle=True),
        epochs=2,
        evaluate=DataLoader(DATA, 3),
        checkpoint=folder / "run",
        every=3,
    )
    return {"loss": summary.loss, "evaluations": [list(x) for x in summary.evaluations]}


def main(folder: Path) -> None:
    with piper.launch(program(entropy, "replicas"), on="torchrun") as trainer:
        found = whole(trainer)
    with piper.launch(resumed.compiled(), on="torchrun") as trainer:
        found |= fitted(trainer, folder)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
