"""A user's script for ``torchrun --nproc-per-node 2``: compiles, trains twice, fails at the end.

Every process prints its exact losses.
"""

from __future__ import annotations

import os

import torch

import piper
from tests.scripts.cases import ON_TWO, acting, batches
from tests.scripts.faulty import Act


def main() -> None:
    rank = os.environ["RANK"]
    program = ON_TWO["experts, ZeRO-3, counted, clipped"].compile()
    for time in range(2):
        with piper.launch(program, on="torchrun") as trainer:
            for batch in batches():
                # in one write: the processes share the pipe
                print(f"{rank} {float(trainer.step(*batch).loss).hex()}\n", end="", flush=True)
            if time == 1:
                trainer.step(*acting(Act.RAISE))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
