"""One of several ranks: trains until rank 1 raises, is killed, or stops. It runs without torchrun's
agent, which would end the other ranks.

    nccl_faulty.py PROGRAM {raise,kill,stop}
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import piper
from tests.scripts.nccl_cases import ON_TWO, batch

NAME = "experts, ZeRO-3"


def main(path: Path, what: str) -> None:
    program = ON_TWO[NAME].load(path)
    with piper.launch(program, on="torchrun", share_gpus=True, timeout=40) as trainer:
        for step in range(3):
            print(float(trainer.step(*batch(step)).loss), flush=True)
        print(f"begins {time.time()}", flush=True)
        if os.environ["RANK"] == "1":
            match what:
                case "raise":
                    raise RuntimeError("told to fail")
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
        print(float(trainer.step(*batch(3)).loss), flush=True)
        print("went on", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
