"""Trains the programs of a folder on several NCCL ranks, or all of them on virtual devices.

    nccl_replay.py FOLDER RANKS [--virtual] [--seeds N] [--graphs]

Under torchrun each rank writes ``numbers.RANK``; with ``--virtual`` one process writes ``numbers``.
With ``--seeds`` every program trains N more steps, each with streams delayed by a new seed. The
host does not wait between these steps: together they may exceed the timeout, which is for one step.
"""

from __future__ import annotations

import argparse
import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import piper
from piper.runtime.streams.stream_jitter import StreamJitter
from tests.scripts.nccl_cases import CASES, Case, batch, numbers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--graphs", action="store_true")
    asked = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    rank = os.environ.get("RANK", "virtual")
    found: dict[str, Any] = {}
    for name, case in CASES[asked.ranks].items():
        path = asked.folder / name
        if not path.exists():
            continue
        start = time.time()
        found[name] = trained(case, path, asked)
        print(f"{rank} {name}: {time.time() - start:.1f} s", flush=True)
    torch.save(found, asked.folder / ("numbers" if asked.virtual else f"numbers.{rank}"))


def trained(case: Case, path: Path, asked: argparse.Namespace) -> dict[str, Tensor]:
    program = case.load(path)
    options = {} if asked.virtual else {"on": "torchrun", "share_gpus": True, "timeout": 30}
    if asked.graphs and not asked.virtual:
        options["cuda_graphs"] = True
    with piper.launch(program, **options) as trainer:
        found = numbers(trainer, 5 if asked.graphs else 2)
        for seed in range(asked.seeds):
            if not asked.virtual:
                shake(trainer, seed)
            found[f"loss of seed {seed}"] = trainer.step(*batch(seed % 8)).loss
        if case.saves and not asked.seeds and not asked.virtual:
            found |= saved_and_loaded(trainer, asked.folder / f"state of {path.name}")
        if asked.seeds:
            state = {f"in the end {n}": x for n, x in trainer.state_dict().items()}
            found |= {n: x.cpu() for n, x in state.items()}
    return {name: x.cpu() for name, x in found.items()}


def saved_and_loaded(trainer: piper.Trainer, path: Path) -> dict[str, Tensor]:
    """The losses of a step and of the same step after loading the state before it."""
    background = path.with_name(f"background {path.name}")
    trainer.save(path)
    trainer.save(background, background=True)
    before = trainer.step(*batch(7)).loss
    trainer.load(background)
    return {"loss without loading": before, "loss after loading": trainer.step(*batch(7)).loss}


def shake(trainer: piper.Trainer, seed: int) -> None:
    """Delay the streams of the next step, with a new seed."""
    group: Any = trainer._session.devices
    for device in group.local.devices:
        device.loaded.executor.streams.jitter = StreamJitter(seed, device.number)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        raise
