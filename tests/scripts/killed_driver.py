"""Launches a program on Ray, trains a step and is killed."""

from __future__ import annotations

import os
import signal

import piper
from tests.scripts.cases import ON_TWO, batches


def main() -> None:
    trainer = piper.launch(ON_TWO["stages"].compile(), on="ray", threads=1)
    trainer.step(*batches()[0])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
