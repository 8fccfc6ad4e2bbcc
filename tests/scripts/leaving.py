"""Loops under torchrun that only some processes leave, each in another way.

    torchrun --nproc-per-node 2 leaving.py FOLDER

Every process must reach the end of each loop, and the state after the last complete step is saved.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import piper
from piper import PiperError
from piper.launch.trainer.step_result import StepResult
from tests.scripts.resumed import batch, compiled

LAST = 3
"""The step after which a process leaves."""


def all_break(trainer: piper.Trainer, run: dict[str, Any]) -> None:
    for _ in trainer.iterate(batch, steps=6, **run):
        if trainer.steps == LAST:
            break


def one_breaks(trainer: piper.Trainer, run: dict[str, Any]) -> None:
    for _ in trainer.iterate(batch, steps=6, **run):
        if trainer.steps == LAST and trainer.rank == 1:
            break


def a_callback_fails(trainer: piper.Trainer, run: dict[str, Any]) -> None:
    class Failing:
        def on_step(self, step: int, result: StepResult) -> None:
            if step == LAST:
                raise ValueError("no more paper")

        def on_end(self) -> None: ...

    trainer.fit(batch, steps=6, callbacks=[Failing()], **run)


def a_loader_fails(trainer: piper.Trainer, run: dict[str, Any]) -> None:
    def rows() -> Iterator[Any]:
        for step in range(6):
            if step == LAST and trainer.rank == 1:
                raise ValueError("no more tapes")
            yield batch(step)

    trainer.fit(rows, **run)


def a_loader_ends(trainer: piper.Trainer, run: dict[str, Any]) -> None:
    trainer.fit([batch(step) for step in range(LAST + trainer.rank)], **run)


def ctrl_c(trainer: piper.Trainer, run: dict[str, Any]) -> None:
    for _ in trainer.iterate(batch, steps=6, **run):
        if trainer.steps == LAST and trainer.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)


WAYS: dict[Callable[[piper.Trainer, dict[str, Any]], None], tuple[str, str]] = {
    all_break: ("", ""),
    one_breaks: ("another process has left the loop after step 3", ""),
    a_callback_fails: ("no more paper", "another process has left the loop after step 3"),
    a_loader_fails: ("another process has left the loop after step 3", "no more tapes"),
    a_loader_ends: ("", "the batches of another process ended after step 3"),
    ctrl_c: ("KeyboardInterrupt", "another process has left the loop after step 3"),
}
"""Each way to leave, and the messages that ranks 0 and 1 get."""


def main(folder: Path) -> None:
    program = compiled()
    for way, words in WAYS.items():
        said = ""
        with piper.launch(program, on="torchrun", timeout=60) as trainer:
            rank = trainer.rank
            try:
                way(trainer, {"checkpoint": folder / way.__name__, "every": 2, "progress": False})
            except (PiperError, ValueError, KeyboardInterrupt) as error:
                said = f"{type(error).__name__}: {error}"
            dist.barrier()
        expected = words[rank]
        assert (expected in said) if expected else not said, (way.__name__, rank, said)
        saved = sorted(path.name for path in (folder / way.__name__).iterdir())
        assert saved == ["step-00000002", "step-00000003"], (way.__name__, saved)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    print("done")
