"""When callbacks are called, and with what."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import piper
from piper.callbacks import (
    CSV,
    MLflow,
    RegionStatistics,
    StepProfile,
    TensorBoard,
    WeightsAndBiases,
    scalars,
)
from piper.launch.trainer.step_result import StepResult
from piper.launch.watch.progress_bar import shown_progress
from piper.strategies import mesh

X = torch.ones(4, 4)


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            with piper.annotate("layer"):
                x = torch.tanh(layer(x))
        return x


class Heard:
    """Records its calls."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.ended = 0

    def on_step(self, step: int, result: StepResult) -> None:
        self.steps.append(step)
        self.losses.append(float(result.loss))

    def on_end(self) -> None:
        self.ended += 1


class Failing(Heard):
    def on_end(self) -> None:
        raise ValueError("no more paper")


@pytest.fixture(scope="module")
def program() -> piper.Program:
    torch.manual_seed(0)
    return piper.compile(
        Net(nn.Linear(4, 4), nn.Linear(4, 4)),
        mesh(pp=2, microbatches=2),
        inputs=(X,),
        targets=(X,),
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@pytest.fixture
def trainer(program: piper.Program) -> Iterator[piper.Trainer]:
    with piper.launch(program) as found:
        yield found


def test_callbacks_are_told_of_every_step_and_of_the_end(trainer: piper.Trainer) -> None:
    heard = Heard()
    results = [float(r) for r in trainer.iterate([(X, X)] * 3, callbacks=[heard])]
    assert (heard.steps, heard.losses, heard.ended) == ([1, 2, 3], results, 1)
    trainer.fit([(X, X)], callbacks=[heard])
    assert (heard.steps, heard.ended) == ([1, 2, 3, 4], 2)


def test_a_resumed_run_counts_on(program: piper.Program, tmp_path: Path) -> None:
    for steps, expected in ((2, [1, 2]), (3, [3])):
        heard = Heard()
        with piper.launch(program) as trainer:
            trainer.fit(
                lambda step: (X, X),
                steps=steps,
                checkpoint=tmp_path,
                resume=True,
                callbacks=[heard],
            )
        assert heard.steps == expected


def test_the_end_is_told_after_an_error_and_to_all(trainer: piper.Trainer) -> None:
    heard = Heard()
    with pytest.raises(ValueError, match="paper"):
        trainer.fit([(X, X)], callbacks=[heard, Failing()])
    with pytest.raises(piper.PiperError):
        trainer.fit([(X[:1], X)], callbacks=[heard])
    next(iter(trainer.iterate([(X, X)] * 2, callbacks=[heard])))  # the second step never runs
    assert heard.ended == 3


@pytest.mark.parametrize("wrong", [print, Heard, None])
def test_what_is_no_callback_is_refused(trainer: piper.Trainer, wrong: object) -> None:
    with pytest.raises(
        piper.PiperError, match=r"callbacks\[1\] is .*: give an object with on_step"
    ):
        trainer.fit([(X, X)], callbacks=[Heard(), wrong])
    with pytest.raises(piper.PiperError, match="every=0 must be"):
        TensorBoard("runs", every=0)


def test_scalars_are_those_of_the_result(trainer: piper.Trainer) -> None:
    result = trainer.step(X, X)
    found = scalars(result)
    assert found["train/loss"] == float(result.loss)
    assert found["train/grad_norm"] == float(result.grad_norm)
    assert found["train/learning_rate"] == 0.1
    evaluated = scalars(trainer.evaluate(X, X))
    assert "evaluation/loss" in evaluated
    assert all(not name.startswith("train/") for name in evaluated)


def test_mfu_is_that_of_the_gpus(trainer: piper.Trainer) -> None:
    """Four layers of 4 x 4 over 4 rows; two devices that share a GPU have one peak."""
    result = trainer.step(X, X)
    assert result.mfu is None
    assert "train/mfu" not in scalars(result)
    flops = 2 * (3 * 2 * 4 * 4 * 4) - 2 * 4 * 4 * 4  # no gradient of the inputs
    for gpus, peaks in (("A100-SXM4-80GB 1", "H200 2"), 2), (("H200 1", "H200 1"), 1):
        report = replace(result._report, gpus=tuple(f"NVIDIA {x}" for x in gpus))
        found = StepResult(report, trainer.program, 2.0, 4)
        peak = 19.5e12 if peaks == 2 else 67e12
        assert found.mfu == pytest.approx(flops / (2.0 * peak * peaks))
        assert scalars(found, 4.0)["train/mfu"] == pytest.approx(found.mfu / 2)
    unknown = replace(result._report, gpus=("NVIDIA X1 1", "NVIDIA H200 2"))
    assert StepResult(unknown, trainer.program, 2.0, 4).mfu is None


@dataclass
class Shown:
    """A step's result with figures that no CPU gives."""

    seconds: float = 2.0
    mfu: float | None = 0.25
    tokens: int = 100
    memory: int = 2**30
    learning_rates: tuple[float, ...] = (0.1,)
    expert_imbalance: Mapping[str, float] = field(default_factory=lambda: {"a": 1.5, "b": 1.25})


def test_progress_has_mfu_and_the_imbalance_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress(2, 0, 1) as display:
        display.show(1, 0.5, None, Shown())
    assert re.search(r"tokens/s, MFU [\d.,]+%, busiest expert 1.50x, ", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("module", "callback"),
    [
        ("tensorboard", TensorBoard("runs")),
        ("wandb", WeightsAndBiases(project="p")),
        ("mlflow", MLflow(run_name="r")),
    ],
)
def test_a_missing_package_is_named(
    trainer: piper.Trainer, module: str, callback: piper.callbacks.Callback
) -> None:
    if find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(piper.PiperError, match=f"not installed: pip install {module}"):
        trainer.fit([(X, X)], callbacks=[callback])


def test_tensorboard_has_what_the_steps_gave(trainer: piper.Trainer, tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoard(tmp_path, every=2)
    losses = [float(r) for r in trainer.iterate([(X, X)] * 4, callbacks=[board])]
    events = loading.EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [e.step for e in events] == [2, 4]
    assert [e.value for e in events] == pytest.approx(losses[1::2])


def test_a_csv_file_has_one_row_for_each_step(trainer: piper.Trainer, tmp_path: Path) -> None:
    """With its evaluation, and whatever else some steps have; a second run continues the file."""
    path = tmp_path / "logs" / "run.csv"
    losses: dict[str, tuple[str, str]] = {}
    for more in ([], [RegionStatistics(every=2), StepProfile(every=2)]):
        log = CSV(path, every=2)
        how = {"evaluate": [(X, X)], "callbacks": [log, *more], "progress": False}
        for result in trainer.iterate([(X, X)] * 3, **how):
            if trainer.steps % 2 == 0:
                losses[str(trainer.steps)] = str(float(result)), ""
        evaluated = str(float(trainer.evaluate(X, X)))
        losses[str(trainer.steps)] = losses.get(str(trainer.steps), ("",))[0], evaluated
    with path.open() as file:
        rows = {row["step"]: row for row in csv.DictReader(file)}
        lines = file.seek(0) or file.readlines()
    assert len(lines) == 1 + len(rows)
    found = {step: (row["train/loss"], row["evaluation/loss"]) for step, row in rows.items()}
    assert found == losses
    observed = {step for step, row in rows.items() if row["activation_rms/layer[0]"]}
    assert observed == {"4", "6"}
    assert all(float(rows[step]["gradient_norm/layer[1]"]) > 0 for step in observed)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_csv_file_of_a_killed_run_has_each_step_once(
    trainer: piper.Trainer, tmp_path: Path
) -> None:
    """Killed after step 5, in the middle of a row, and resumed from step 3; then killed between the
    last step and its evaluation."""
    how = {"checkpoint": tmp_path / "run", "every": 3, "progress": False}
    path = tmp_path / "run.csv"
    for _ in trainer.iterate([(X, X)] * 3, **how, callbacks=[CSV(path)]):
        pass
    list(trainer.iterate([(X, X)] * 2, callbacks=[CSV(path)], progress=False))
    first = rows_of(path)
    with path.open("a") as file:
        file.write("6,0.1")
    with piper.launch(trainer.program) as again:
        again.fit([(X, X)] * 6, steps=6, resume=True, **how, callbacks=[CSV(path)])
    resumed = rows_of(path)
    assert [row["step"] for row in resumed] == ["1", "2", "3", "4", "5", "6"]
    assert [row["train/loss"] for row in resumed[:5]] == [row["train/loss"] for row in first]

    log = CSV(path)
    log.on_evaluate(6, trainer.evaluate(X, X))
    log.on_end()
    assert rows_of(path)[:-1] == [{**row, **_evaluation()} for row in resumed[:-1]]
    assert rows_of(path)[-1]["train/loss"] == resumed[-1]["train/loss"]
    assert float(rows_of(path)[-1]["evaluation/loss"]) > 0


def _evaluation() -> dict[str, str]:
    names = ("loss", "tokens_per_second", "seconds", "memory_bytes")
    return {f"evaluation/{name}": "" for name in names}


def test_a_csv_file_that_a_new_run_replaces_is_announced(
    trainer: piper.Trainer, tmp_path: Path
) -> None:
    path = tmp_path / "run.csv"
    trainer.fit([(X, X)] * 2, callbacks=[CSV(path)])
    announced = pytest.warns(piper.PiperWarning, match="to step 2; this run begins at step 1")
    with piper.launch(trainer.program) as other, announced:
        other.fit([(X, X)], callbacks=[CSV(path)])
    assert [row["step"] for row in rows_of(path)] == ["1"]


def test_another_table_is_refused(trainer: piper.Trainer, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("name,age\n")
    with pytest.raises(piper.PiperError, match="not a log of steps: its first column is 'name'"):
        trainer.fit([(X, X)], callbacks=[CSV(path)])


def test_two_observers_of_a_step_take_turns(trainer: piper.Trainer) -> None:
    """A step that is observed has the same loss."""
    observers = [RegionStatistics(every=2), StepProfile(every=2)]
    seen = [
        (bool(r.gradients), bool(r.activations), r.profile is not None, float(r))
        for r in trainer.iterate([(X, X)] * 3, callbacks=observers)
    ]
    assert [x[:3] for x in seen] == [(False,) * 3, (True, True, False), (False, False, True)]
    with piper.launch(trainer.program) as plain:
        assert [x[3] for x in seen] == [float(plain.step(X, X)) for _ in range(3)]


def test_a_callback_may_have_the_trainer(trainer: piper.Trainer) -> None:
    class Weights(Heard):
        def on_begin(self, trainer: piper.Trainer) -> None:
            self.trainer = trainer

        def on_step(self, step: int, result: StepResult) -> None:
            super().on_step(step, result)
            self.weights = self.trainer.state_dict()

    kept = Weights()
    trainer.fit([(X, X)] * 2, callbacks=[kept])
    assert kept.steps == [1, 2]
    assert all(torch.equal(kept.weights[k], x) for k, x in trainer.state_dict().items())


class Package:
    """Stands in for mlflow, which is not installed here."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def start_run(self, **settings: object) -> None:
        self.calls.append(("start", settings))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, metrics["train/loss"])))

    def end_run(self) -> None:
        self.calls.append(("end", None))


def test_mlflow_is_called_as_documented(
    trainer: piper.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package()
    monkeypatch.setitem(sys.modules, "mlflow", package)
    results = list(trainer.iterate([(X, X)] * 2, callbacks=[MLflow(run_name="r")]))
    logged = [("log", (step, float(x))) for step, x in enumerate(results, 1)]
    assert package.calls == [("start", {"run_name": "r"}), *logged, ("end", None)]
