"""Runs that end by themselves or by force resume from their last checkpoint, with losses equal bit
for bit to an uninterrupted run."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import piper
from piper import PiperError
from piper.base.errors import PiperWarning
from tests.scripts import resumed
from tests.scripts.resumed import batch

ROOT = Path(__file__).parents[2]
STEPS = 12


@functools.cache
def program() -> piper.Program:
    return resumed.compiled()


@functools.cache
def expected(steps: int = STEPS) -> list[float]:
    with piper.launch(program()) as trainer:
        return [float(trainer.step(*batch(step)).loss) for step in range(steps)]


class Loader:
    """A loader with a state: its position among ``STEPS`` batches."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < STEPS:
            self.at += 1
            yield batch(self.at - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rng": torch.arange(40, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rng"].dtype is torch.uint8
        self.at = state["at"]


BATCHES = {
    "a function": lambda: batch,
    "a list": lambda: [batch(step) for step in range(STEPS)],
    "a generator": lambda: (batch(step) for step in range(STEPS)),
    "a loader": Loader,
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("end", [1, 4, 7])
def test_a_run_goes_on_where_it_was_saved(kind: str, end: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {"steps": STEPS, "checkpoint": tmp_path / "run", "every": 3}
    found: dict[int, float] = {}
    with piper.launch(program()) as trainer:
        for result in trainer.iterate(BATCHES[kind](), progress=False, **how):
            found[trainer.steps] = float(result.loss)
            if trainer.steps == end:
                break
    with piper.launch(program()) as trainer:
        for result in trainer.iterate(BATCHES[kind](), progress=False, resume=True, **how):
            assert found.setdefault(trainer.steps, float(result.loss)) == float(result.loss)
    assert list(found.values()) == expected()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [f"step-{step:08}" for step in sorted((3, 6, 9, 12, end))]


def test_a_run_that_is_over_does_nothing(tmp_path: Path) -> None:
    how: dict[str, Any] = {"steps": 2, "checkpoint": tmp_path, "progress": False}
    for again in range(2):
        with piper.launch(program()) as trainer:
            told = pytest.warns(PiperWarning, match="this call trains nothing: the run was resumed")
            with told if again else contextlib.nullcontext():
                assert trainer.fit(batch, resume=True, **how).steps == (0 if again else 2)
            assert trainer.steps == 2


def with_rate(rate: float, *, scheduled: bool) -> piper.Program:
    """A program with this learning rate: the same at all steps, or one that falls."""
    options: dict[str, Any] = {} if scheduled else {"scheduler": None}
    return resumed.compiled(optimizer=functools.partial(torch.optim.SGD, lr=rate), **options)


@pytest.mark.parametrize("scheduled", [False, True])
def test_another_learning_rate_is_told(scheduled: bool, tmp_path: Path) -> None:
    """The checkpoint's is restored, or on request the program's, scaled by the scheduler."""
    path, run = tmp_path / "step-00000006", {"checkpoint": tmp_path, "progress": False}
    one, two = (with_rate(rate, scheduled=scheduled) for rate in (0.5, 0.25))
    with piper.launch(one) as trainer:
        trainer.fit(batch, steps=6, **run)
        expected = [trainer.step(*batch(6)).learning_rates[0] for _ in range(6)]
    words = r"lr=0\.5 \(given 0\.25\)\. For the given ones, pass new_settings=True"

    def resumed_by_fit(trainer: piper.Trainer, **how: Any) -> None:
        loop = trainer.iterate(batch, resume=True, **run, **how)
        with warnings.catch_warnings(action="ignore"):  # it has trained nothing
            loop.close()

    for resume in (lambda t, **how: t.load(path, **how), resumed_by_fit):
        with piper.launch(two) as trainer:
            with pytest.warns(PiperWarning, match=words) as caught:
                resume(trainer)
            assert len(caught) == 1
            assert [trainer.step(*batch(6)).learning_rates[0] for _ in range(6)] == expected
        with piper.launch(two) as trainer, warnings.catch_warnings():
            warnings.simplefilter("error")
            resume(trainer, new_settings=True)
            rates = [trainer.step(*batch(6)).learning_rates[0] for _ in range(6)]
            assert rates == pytest.approx([rate / 2 for rate in expected])
    with piper.launch(one) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.load(path)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    how: dict[str, Any] = {"checkpoint": tmp_path, "every": 2, "progress": False}
    with piper.launch(program()) as trainer:
        trainer.fit(batch, steps=6, **how)
    path = tmp_path / "step-00000006" / "device-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with piper.launch(program()) as trainer:
        with pytest.warns(PiperWarning, match=r"does not resume from step 6: .*device-00001"):
            run = trainer.iterate(batch, steps=STEPS, resume=True, **how)
        assert [float(result) for result in run] == expected()[4:]


@pytest.mark.parametrize("folder", ["run", "run/step-00000004"])
def test_a_run_goes_on_from_a_checkpoint_of_another_folder(folder: str, tmp_path: Path) -> None:
    given = [batch(step) for step in range(3)]  # in several passes
    how: dict[str, Any] = {"progress": False, "steps": 6, "resume": tmp_path / folder}
    with piper.launch(program()) as trainer:
        whole = [float(result) for result in trainer.iterate(given, steps=6, progress=False)]
    with piper.launch(program()) as trainer:
        trainer.fit(given, steps=4, checkpoint=tmp_path / "run", progress=False)
    with piper.launch(program()) as trainer:
        assert [float(result) for result in trainer.iterate(given, **how)] == whole[4:]
    with piper.launch(program()) as trainer:
        for _ in trainer.iterate(given, checkpoint=tmp_path / "other", **how):
            break
    with piper.launch(program()) as trainer:  # the other folder is further now
        rest = [float(x) for x in trainer.iterate(given, checkpoint=tmp_path / "other", **how)]
    assert rest == whole[5:]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000004"]
    with piper.launch(program()) as trainer, pytest.raises(PiperError, match="nowhere"):
        trainer.fit(given, resume=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 2}, "need checkpoint=, a folder"),
        ({"steps": -1}, "steps=-1 must be a whole number, at least 0, or None"),
        ({"checkpoint": "run", "every": 0}, "every=0 must be a whole number, at least 1"),
        ({"checkpoint": "run", "keep": 1.5}, "keep=1.5 must be a whole number, at least 1"),
        (
            {"checkpoint": "run"},
            "has the checkpoints of a run that reached step 1: set resume=True",
        ),
        ({"checkpoint": "file"}, "cannot be used for checkpoints"),
    ],
)
def test_runs_that_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with piper.launch(program()) as trainer:
        trainer.fit(batch, steps=1, checkpoint="run", progress=False)
    with piper.launch(program()) as trainer, pytest.raises(PiperError, match=words):
        trainer.fit(batch, **options)


# killed processes


class Run:
    """A script in its own process."""

    def __init__(self, folder: Path, on: str, steps: int, *how: str) -> None:
        self.folder = folder
        command = [sys.executable]
        if on == "torchrun":
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = str(ROOT / "tests" / "scripts" / "resumed.py")
        self.process = subprocess.Popen(
            [*command, script, str(folder), on, str(steps), *how],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def wait_for(self, lines: int) -> None:
        log = self.folder / "log.0"
        while self.process.poll() is None:
            if log.exists() and log.read_text().count("\n") >= lines:
                return
            time.sleep(0.005)
        raise AssertionError("it has ended by itself")

    def kill(self, number: int) -> int:
        os.killpg(self.process.pid, number)
        return self.process.wait(120)


def losses(folder: Path) -> list[float]:
    """The losses by step; a loss that was logged several times must be the same each time."""
    found: dict[int, float] = {}
    for line in (folder / "log.0").read_text().splitlines():
        if line != "done":
            number, loss = line.split()
            assert found.setdefault(int(number), float.fromhex(loss)) == float.fromhex(loss)
    assert list(found) == sorted(found)
    return list(found.values())


@pytest.mark.cases(fast=0, slow=2)
@pytest.mark.parametrize("on", ["processes", "torchrun", "virtual"])
def test_sigterm_finishes_the_step_saves_and_ends(on: str, tmp_path: Path) -> None:
    run = Run(tmp_path, on, 10**6)
    run.wait_for(5)
    code = run.kill(signal.SIGTERM)
    assert code == 143 or on == "torchrun"
    seen = losses(tmp_path)
    saved = max(path.name for path in (tmp_path / "run").iterdir())
    assert saved == f"step-{len(seen):08}"
    assert "done" not in (tmp_path / "log.0").read_text()
    again = Run(tmp_path, on, len(seen) + 4)
    assert again.process.wait(120) == 0
    assert losses(tmp_path) == expected(len(seen) + 4)


def killed_again_and_again(folder: Path, on: str, times: int, seed: int, *how: str) -> None:
    rng = random.Random(seed)
    for _ in range(times):
        log = folder / "log.0"
        before = log.read_text().count("\n") if log.exists() else 0
        run = Run(folder, on, 10**6, *how)
        run.wait_for(before + 1)
        time.sleep(rng.uniform(0, 0.3))
        run.kill(signal.SIGKILL)
        for path in (folder / "run").iterdir():
            if not path.name.startswith("."):
                assert (path / "index.json").exists()
    steps = len(losses(folder)) + 4
    last = Run(folder, on, steps, *how)
    assert last.process.wait(120) == 0
    assert losses(folder) == expected(steps)
    names = sorted(path.name for path in (folder / "run").iterdir())
    assert len(names) == 2
    assert names[-1] == f"step-{steps:08}"


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("background",)])
def test_kill_9_at_many_moments(how: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.scripts.kills", str(tmp_path), "20", *how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, timeout=600, check=True)


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize("how", [("background",), ()])
def test_kill_9_with_workers(how: tuple[str, ...], tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, "processes", 2, 1, *how)


@pytest.mark.slow
def test_saves_in_the_background_under_torchrun(tmp_path: Path) -> None:
    for steps in (7, STEPS):
        assert Run(tmp_path, "torchrun", steps, "background").process.wait(120) == 0
        names = sorted(path.name for path in (tmp_path / "run").iterdir())
        assert names[-1] == f"step-{steps:08}"
    assert losses(tmp_path) == expected()
    assert names == ["step-00000009", "step-00000012"]
