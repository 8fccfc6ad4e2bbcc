"""The run that a campaign of faults disturbs (``campaign.py``); started again after its process is
lost or its disk was full, it continues from its last checkpoint.

    python -m tests.scripts.campaign_run FOLDER

``FOLDER/run.json`` says what to train and how. It appends a line for each step to
``FOLDER/log.RANK``: its number, its loss, the time, and the seconds and number of its recoveries.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import piper
from tests.scripts.cases import ON_TWO, Net, batches, mean_loss

if "FAULT_AT" in os.environ:
    import_module("tests.scripts.fault_at")

PAIR = "stages, tied weights, dropout"
REPLICAS = {
    "replicas": {"dp": 3, "microbatches": 2},
    "stages of replicas, ZeRO-1": {"pp": 2, "dp": 2, "microbatches": 2, "zero": 1},
}
"""In fp64, because without a replica sums have another order."""
sgd = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9)
stepped = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.9)


@functools.cache
def program(name: str) -> piper.Program:
    if name == PAIR:
        return ON_TWO[name].compile(clip_norm=1.0, scheduler=stepped)
    torch.manual_seed(0)
    (x, y), _ = batches()
    return piper.compile(
        Net(tied=True, dropout=0.2).double(),
        piper.strategies.mesh(**REPLICAS[name]),
        inputs=(x,),
        targets=(y,),
        loss=mean_loss,
        optimizer=sgd,
        scheduler=stepped,
        clip_norm=1.0,
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    return batches()[step % 2]


def main(folder: Path) -> None:
    given: dict[str, Any] = json.loads((folder / "run.json").read_text())
    rank, seen = os.environ.get("RANK", "0"), 0
    try:
        with (
            piper.launch(program(given["case"]), **given["launch"]) as trainer,
            (folder / f"log.{rank}").open("a", buffering=1) as log,
        ):
            for result in trainer.iterate(
                batch,
                checkpoint=folder / "disk" / "run",
                resume=True,
                progress=False,
                **given["fit"],
            ):
                new, seen = trainer.recoveries[seen:], len(trainer.recoveries)
                taken = sum(recovery.seconds for recovery in new)
                loss = float(result.loss).hex()
                log.write(f"{trainer.steps} {loss} {time.time()} {taken} {len(new)}\n")
                if any(recovery.lost for recovery in new):
                    trainer.switch(trainer.program)  # the lost devices work again
            torch.save(trainer.state_dict(), folder / f"state.{rank}")
    except piper.PiperError as error:
        if "No space left on device" in str(error):
            (folder / "full").touch()
        raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
