"""A run that is killed (SIGKILL) at random moments of starting, training and saving, any number of
times, and restarted each time.

    python -m tests.scripts.kills FOLDER TIMES [background]

A run is a fork of this process, which has already compiled the program, so it starts at once. At
the end, the losses of all steps equal those of an uninterrupted run, the newest checkpoint is that
of the last step, and nothing is left of unfinished ones.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import piper
from tests.scripts.resumed import batch, compiled, main

LONGEST = 1.0
"""The longest time until a run is killed, in seconds."""


def started(program: piper.Program, folder: Path, steps: int, background: bool) -> int:
    """Start a run in its own process; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        main(program, folder, "virtual", steps, background)
        code = 0
    finally:
        os._exit(code)


def seen(folder: Path, rank: int = 0) -> dict[int, str]:
    """The loss of each step; a loss that was logged several times must be the same each time."""
    found: dict[int, str] = {}
    log = folder / f"log.{rank}"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    for line in lines:
        if line != "done\n" and line.endswith("\n"):
            number, loss = line.split()
            assert found.setdefault(int(number), loss) == loss, f"step {number} has two losses"
    return found


def kill_again_and_again(folder: Path, times: int, background: bool) -> int:
    """Returns the number of steps made."""
    program = compiled()
    rng = random.Random(times)
    for _ in range(times):
        pid = started(program, folder, 10**6, background)
        time.sleep(rng.uniform(0, LONGEST))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "a run ended by itself"
        for path in (folder / "run").glob("[!.]*"):
            assert (path / "index.json").exists(), f"{path.name} is no whole checkpoint"
    steps = max(seen(folder), default=0) + 4
    _, status = os.waitpid(started(program, folder, steps, background), 0)
    assert status == 0, "the last run failed"
    with piper.launch(program) as trainer:
        results = trainer.iterate(batch, steps=steps, progress=False)
        expected = {i: float(result.loss).hex() for i, result in enumerate(results, start=1)}
    assert seen(folder) == expected, "losses differ from those of a run that nobody killed"
    left = sorted(path.name for path in (folder / "run").iterdir())
    assert left[-1] == f"step-{steps:08}", left
    assert len(left) == 2, left
    return steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, count = Path(sys.argv[1]), int(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    done = kill_again_and_again(where, count, "background" in sys.argv)
    print(f"{count} kills, {done} steps: the losses of a run that nobody killed")
