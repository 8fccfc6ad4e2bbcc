"""Trains on worker processes until it is interrupted or killed.

    victim.py PROGRAM ACT

It prints the ids of its workers, then makes one of them do ``ACT``. If it can exit in order
afterwards, it also has an idle trainer. It closes no trainer.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

import piper
from tests.scripts.cases import ON_ONE, acting
from tests.scripts.faulty import Act
from tests.scripts.leftovers import children, grandchildren


def main(path: Path, what: Act) -> None:
    program = ON_ONE.load(path)
    count = 2 if what is Act.INTERRUPT_PARENT else 1
    trainers = [piper.launch(program, on="processes", threads=1) for _ in range(count)]
    print(*children(), *grandchildren(), flush=True)
    for trainer in trainers:
        trainer.step(*acting(what))


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore it
    main(Path(sys.argv[1]), Act[sys.argv[2]])
