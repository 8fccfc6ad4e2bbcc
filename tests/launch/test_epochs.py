"""Epochs: evaluation of held-out batches, patience, samplers, and resume after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import piper
from piper import PiperError, PiperWarning
from piper.launch.loop.fit_summary import Ended
from piper.launch.trainer.step_result import StepResult
from tests.launch import test_evaluation
from tests.launch.test_loop import BATCHES, DATA, ROWS, program
from tests.launch.test_torchrun import torchrun
from tests.scripts import data_sets, epochs, resumed

ROOT = Path(__file__).parents[2]
HELD_OUT = DataLoader(TensorDataset(*resumed.batch(50)), 3)


@pytest.fixture
def trainer() -> Iterator[piper.Trainer]:
    with piper.launch(program()) as found:
        yield found


class Heard:
    """Records the steps and evaluations."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, float]] = []

    def on_step(self, step: int, result: StepResult) -> None:
        self.events.append(("step", step, float(result)))

    def on_evaluate(self, step: int, result: StepResult) -> None:
        self.events.append(("evaluated", step, float(result)))

    def on_end(self) -> None: ...

    def evaluated(self) -> list[int]:
        return [step for kind, step, _ in self.events if kind == "evaluated"]


@pytest.mark.parametrize(
    ("options", "steps", "evaluated", "ended"),
    [
        ({"epochs": 3}, 12, [4, 8, 12], Ended.EPOCHS),
        ({"epochs": 3, "steps": 6}, 6, [4, 6], Ended.STEPS),
        ({"epochs": 1, "steps": 6}, 4, [4], Ended.EPOCHS),
        ({"steps": 6, "evaluate_every": 4}, 6, [4, 6], Ended.STEPS),
        ({"epochs": 2, "evaluate_every": 3}, 8, [3, 6, 8], Ended.EPOCHS),
        ({}, 4, [4], Ended.BATCHES),
    ],
)
def test_epochs_and_evaluations(
    options: dict[str, Any], steps: int, evaluated: list[int], ended: Ended, trainer: piper.Trainer
) -> None:
    heard = Heard()
    summary = trainer.fit(BATCHES, evaluate=HELD_OUT, callbacks=[heard], **options)
    assert (trainer.steps, heard.evaluated(), summary.ended) == (steps, evaluated, ended)
    assert summary.epochs == steps // 4
    assert summary.evaluations == tuple(x[1:] for x in heard.events if x[0] == "evaluated")
    assert summary.evaluations[-1][1] == float(trainer.evaluate(HELD_OUT))
    losses = [loss for kind, _, loss in heard.events if kind == "step"]
    assert (summary.first_loss, summary.loss) == (losses[0], losses[-1])
    assert summary.best_loss == (losses.index(min(losses)) + 1, min(losses))


def test_training_does_not_depend_on_evaluations() -> None:
    """Although both loaders draw from torch's generator."""
    found = []
    for evaluate in (None, DataLoader(DATA, 3, shuffle=True)):
        heard = Heard()
        torch.manual_seed(3)
        with piper.launch(program()) as trainer:
            loader = DataLoader(DATA, ROWS, shuffle=True)
            every = None if evaluate is None else 2
            trainer.fit(
                loader, epochs=2, evaluate=evaluate, evaluate_every=every, callbacks=[heard]
            )
        found.append([x for x in heard.events if x[0] == "step"])
    assert found[0] == found[1]


def test_patience_ends_a_run_and_a_resumed_one(tmp_path: Path) -> None:
    """The learning rate is so large that the loss soon rises."""
    made = program(optimizer=lambda params: torch.optim.SGD(params, lr=30.0), scheduler=None)
    how: dict[str, Any] = {"epochs": 20, "evaluate": HELD_OUT, "evaluate_every": 1, "patience": 3}
    with piper.launch(made) as trainer:
        whole = trainer.fit(BATCHES, **how)
    best = whole.best_evaluation
    assert best is not None
    assert whole.ended is Ended.PATIENCE
    assert whole.last_step == best[0] + 3
    assert best[1] == min(loss for _, loss in whole.evaluations)
    assert f"best {best[1]:.4f} (step {best[0]})" in str(whole)
    how |= {"checkpoint": tmp_path, "resume": True}
    with piper.launch(made) as trainer:
        for _ in trainer.iterate(BATCHES, **how):
            if trainer.steps == best[0] + 1:
                break
    for _ in range(2):  # the second time nothing is left to do
        with piper.launch(made) as trainer, pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer._session.notices, "give", lambda *_: None)
            resumed_run = trainer.fit(BATCHES, **how)
        assert resumed_run.evaluations == whole.evaluations
        assert (resumed_run.last_step, resumed_run.ended) == (whole.last_step, Ended.PATIENCE)


@pytest.mark.parametrize("sign", [1, -1], ids=["the loss", "a monitor"])
def test_the_best_checkpoint_is_kept(sign: int, tmp_path: Path) -> None:
    """Beside the last ones, and also after a resume; a trainer that loads it has its loss."""
    made = program(optimizer=lambda params: torch.optim.SGD(params, lr=30.0), scheduler=None)
    how: dict[str, Any] = {
        "evaluate": HELD_OUT, "evaluate_every": 1, "keep": 2, "every": 1, "keep_best": True,
        "checkpoint": tmp_path, "resume": True,
    }  # fmt: skip
    if sign == -1:
        how["monitor"] = lambda result: -float(result.loss)
    for steps in (3, 6):
        with piper.launch(made) as trainer:
            summary = trainer.fit(BATCHES, steps=steps, **how)
            best = summary.best_evaluation
            assert best is not None
            assert best[1] == sign * min(sign * loss for _, loss in summary.evaluations)
            folders = sorted(path.name for path in tmp_path.iterdir())
            assert folders == ["best", f"step-{steps - 1:08}", f"step-{steps:08}"]
            trainer.load(tmp_path / "best")
            assert (trainer.steps, float(trainer.evaluate(HELD_OUT))) == best


def test_a_sampler_is_told_the_epoch(trainer: piper.Trainer) -> None:
    class Told(RandomSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    loader = DataLoader(DATA, ROWS, sampler=Told(DATA))
    trainer.fit(loader)  # one pass, of which the caller may have told the sampler
    assert Told.epochs == []
    trainer.fit(loader, epochs=3)
    assert Told.epochs == [0, 1, 2]


def test_what_is_refused(trainer: piper.Trainer) -> None:
    refused: dict[str, dict[str, Any]] = {
        "epochs=0 must be a whole number, at least 1": {"epochs": 0},
        "evaluate_every=, monitor=, patience= and keep_best= need evaluate=, held-out batches": {
            "patience": 2
        },
        "evaluate= is a list_iterator, and the batches are read several times": {
            "evaluate": iter(BATCHES)
        },
        "evaluate= is an int": {"evaluate": 3},
        "fit() has no argument 'epoch': did you mean epochs?": {"epoch": 3},
    }
    for words, options in refused.items():
        with pytest.raises(PiperError, match=re.escape(words)):
            trainer.fit(BATCHES, **options)
    with pytest.raises(PiperError, match="epochs= counts passes over the batches"):
        trainer.fit(lambda step: BATCHES[step], epochs=2)
    with pytest.raises(PiperError, match="epochs=2 is not possible: a generator"):
        trainer.fit(iter(BATCHES), epochs=2)
    with pytest.warns(PiperWarning, match=f"the batches ended after {len(BATCHES)} of 9 steps"):
        trainer.fit(iter(BATCHES), epochs=2, steps=9)


def test_lines_where_there_is_no_terminal(
    trainer: piper.Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.fit(BATCHES, epochs=25)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["step 1 of 100", "step 5 of 100"]
    assert len(lines) == 21
    figures = r"loss \S+, norm \S+, lr \S+, \S+ tokens/s, .*/step, process peak .*, .* left"
    assert re.fullmatch(f"step 5 of 100: {figures}", lines[1])
    trainer.fit(BATCHES, progress=0)
    trainer.fit(BATCHES, progress=3)
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "step 105 of 108", "step 108 of 108"
    ]  # fmt: skip


def test_a_line_is_written_as_soon_as_its_step_ends(
    trainer: piper.Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    """So its pace is that of its own steps."""
    for _ in trainer.iterate(BATCHES, steps=3, progress=1):
        line, *others = capsys.readouterr().err.splitlines()
        assert line.startswith(f"step {trainer.steps} of 3: loss ")
        assert not others
    assert capsys.readouterr().err == ""


def test_evaluations_are_among_the_lines(
    trainer: piper.Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    how: dict[str, Any] = {"steps": 3, "evaluate": HELD_OUT, "evaluate_every": 2}
    summary = trainer.fit(BATCHES, progress=1, **how)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r": .*", "", line) for line in lines] == [
        "step 1 of 3", "step 2 of 3", "evaluation after step 2", "step 3 of 3",
        "evaluation after step 3",
    ]  # fmt: skip
    assert lines[-1].endswith(f": loss {summary.evaluations[-1][1]:.4f}")
    trainer.fit(BATCHES, progress=False, **how)
    assert capsys.readouterr().err == ""


def test_a_bar_shows_evaluations(
    trainer: piper.Trainer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any file for a terminal
    trainer.fit(BATCHES, steps=2, evaluate=HELD_OUT, evaluate_every=1)
    said = capsys.readouterr().err
    assert re.findall(r"evaluation after step (\d): loss \d", said) == ["1", "2"]
    trainer.fit(BATCHES, steps=3, progress=2)  # a number asks for lines
    assert re.findall(r"^step (\d) of 5", capsys.readouterr().err, re.M) == ["4", "5"]


def test_the_lines_name_checkpoints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    how: dict[str, Any] = {"steps": 4, "checkpoint": "run", "progress": 1}
    with piper.launch(program()) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.fit(BATCHES, callbacks=[Interrupts(2)], **how)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "stopped after step 2: saved run/step-00000002; to continue, run again with resume=True "
        "(piper train: --resume)"
    )
    with piper.launch(program()) as trainer:
        trainer.fit(BATCHES, resume=True, **how)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "resumed from run/step-00000002"
    assert [line.split(":")[0] for line in lines] == ["step 3 of 4", "step 4 of 4"]
    with piper.launch(program()) as trainer:
        trainer.fit(BATCHES, steps=5, progress=1, resume="run")
    assert capsys.readouterr().err.startswith("resumed from run/step-00000004\nstep 5 of 5: ")


class Interrupts:
    """Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, step: int, result: StepResult) -> None:
        if step == self._step:
            raise KeyboardInterrupt

    def on_end(self) -> None: ...


# resume


def events(log: Path) -> dict[str, set[str]]:
    """By step or evaluation, the losses in the log of a run: one each, if none differs."""
    found: dict[str, set[str]] = {}
    for line in log.read_text().splitlines():
        name, loss = line.rsplit(" ", 1)
        found.setdefault(name, set()).add(loss)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("last", [13, 17])
def test_kill_9_in_the_second_epoch(last: int, tmp_path: Path) -> None:
    """A shuffled loader whose workers draw random numbers: the losses and the evaluations are those
    of a run that was not killed, bit for bit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    command = [sys.executable, "-m", "tests.scripts.epochs", str(killed), str(last)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    assert run.returncode == -signal.SIGKILL
    assert f"{last}" in events(killed / "log")
    state = torch.get_rng_state()
    for folder in (whole, killed):
        epochs.train(resumed.compiled(), folder)
    torch.set_rng_state(state)
    expected = events(whole / "log")
    assert len(expected) == 24 + 3
    assert events(killed / "log") == expected


@pytest.mark.slow
def test_processes_under_torchrun_evaluate_the_same(tmp_path: Path) -> None:
    with torchrun(2, "data_sets.py", tmp_path) as run:
        _, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    with piper.launch(test_evaluation.program(test_evaluation.entropy, "replicas")) as trainer:
        found = data_sets.whole(trainer)
    with piper.launch(program()) as trainer:
        found |= data_sets.fitted(trainer, tmp_path / "here")
    assert first == second == found
