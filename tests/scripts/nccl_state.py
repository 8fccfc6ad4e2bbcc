"""State on several ranks that share a GPU: switches, saves, initial weights and outputs.

    nccl_state.py FOLDER RANKS [--virtual] [--device cpu]

Under torchrun each rank writes ``numbers.RANK``; with ``--virtual`` one process writes
``numbers``. Beside them are plain and background saves of the same states. ``FOLDER/weights`` has
the initial weights of ``tests.state.test_weights.Wide``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import piper
from piper import place, replicate
from tests.scripts import switched
from tests.scripts.switched import batch, losses
from tests.state.test_weights import wide
from tests.training import one_f_one_b, pipeline, shared_captures

switched.STRATEGIES |= {
    "turned": [place({}, devices=[1, 0]), replicate({}, zero=3, bucket_mb=1e-3)],
    "stages": pipeline([[1], [0]], 4, *one_f_one_b(2, 4), by=[2, 2]),
}
NAMES = {2: ["turned", "stages", "one"], 4: switched.ON_FOUR}


def outputs(prediction: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"rows": prediction, "error": (prediction - target).abs().mean()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    on: dict[str, Any] = {} if asked.virtual else {"on": "torchrun", "timeout": 120}
    if asked.device == "cuda" and not asked.virtual:
        on["share_gpus"] = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = {name: x.cpu() for name, x in everything(asked, on).items()}
    rank = "" if asked.virtual else f".{os.environ['RANK']}"
    torch.save(found, asked.folder / f"numbers{rank}")


def everything(asked: argparse.Namespace, on: dict[str, Any]) -> dict[str, Tensor]:
    who = "virtual" if asked.virtual else "ranks"
    net = switched.model()
    with shared_captures():
        programs = {
            name: switched.compiled(name, net, device=asked.device, outputs=outputs)
            for name in NAMES[asked.ranks]
        }
    found: dict[str, Tensor] = {}
    with piper.launch(next(iter(programs.values())), **on) as trainer:
        found["losses"] = torch.tensor(losses(trainer, list(programs.values())))
        for name, program in programs.items():
            trainer.switch(program)
            trainer.save(asked.folder / f"{who} {name} plain")
            trainer.save(asked.folder / f"{who} {name} background", background=True)
            found[f"error under {name}"] = trainer.step(*batch(20)).outputs["error"]
            found[f"rows under {name}"] = trainer.evaluate(*batch(3)).outputs["rows"]
            trainer.load(asked.folder / f"{who} {name} background")
        found |= trainer.state_dict()
    zero3 = [place({}, devices=range(asked.ranks)), replicate({}, zero=3)]
    first = wide(asked.folder / "weights", zero3, device=asked.device)
    with piper.launch(first, **on) as trainer:
        found |= {f"first {name}": x for name, x in trainer.state_dict().items()}
    return found


if __name__ == "__main__":
    main()
