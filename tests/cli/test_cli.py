"""The command line: every command, its help, JSON and exit codes, in this process and as an
installed program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

import piper
from piper.base.errors import PiperError, PiperWarning
from piper.base.units import nbytes_of, seconds_of
from piper.cli.app import app
from piper.cli.options import cluster_of
from piper.cli.scripts import job_in, meshed
from piper.launch.launchers import Where
from piper.program.job_settings import job_with, settings_text
from piper.strategies import mesh
from tests.strategies.test_strategy_errors import MISTAKES, Mistake

SCRIPT = """
import torch
from torch import nn
import piper


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        with piper.annotate("embed"):
            x = self.embed(x)
        for layer in self.layers:
            with piper.annotate("layer"):
                x = x + torch.tanh(layer(x))
        with piper.annotate("head"):
            return self.head(x)


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        x = torch.randn(8, 4, generator=generator)
        yield x, x


def job():
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    return piper.Job(
        Net(),
        inputs=(x,),
        targets=(x,),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batches=batches,
    )
"""
TWO = "pp=2,dp=2,schedule=1f1b,microbatches=2,zero=1"
COMMANDS = ("train", "check", "verify", "show", "simulate", "profile", "compare")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("job") / "small_job.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments: object, code: int = 0) -> Result:
    found = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})
    assert found.exit_code == code, found.output
    return found


def run_json(*arguments: object, code: int = 0) -> Any:
    """The one line of JSON that a command prints."""
    (line,) = run(*arguments, "--json", code=code).stdout.splitlines()
    return json.loads(line)


def losses(script: object, *more: object) -> list[float]:
    """The losses of all steps that ``piper train`` prints."""
    lines = run("train", script, "-m", TWO, *more, "--json").stdout.splitlines()
    return [json.loads(line)["loss"] for line in lines]


# --- help ----------------------------------------------------------------------------------------


def test_help_lists_every_command() -> None:
    text = run("--help").stdout
    assert all(re.search(rf"^\W+{name} ", text, re.M) for name in COMMANDS)
    assert "0 done, 1 refused, 2 wrong usage, 3 a run failed" in " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str) -> None:
    text = run(command, "--help").stdout
    assert f"Example: piper {command} " in " ".join(text.split())
    assert "--json" in text
    assert run(command, code=2).output  # without arguments too


def test_the_version_is_printed() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", run("--version").stdout.strip())


def test_a_shell_can_complete() -> None:
    asked = {"_PIPER_COMPLETE": "complete_bash", "COMP_WORDS": "piper s", "COMP_CWORD": "1"}
    found = CliRunner().invoke(app, [], prog_name="piper", env=asked).output
    assert found.split() == ["show", "simulate", "status"]
    asked = {
        "_PIPER_COMPLETE": "complete_bash",
        "COMP_WORDS": "piper train --on ",
        "COMP_CWORD": "3",
    }
    found = CliRunner().invoke(app, [], prog_name="piper", env=asked).output
    assert found.split() == [where.value for where in Where]


# --- check ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_check_verifies_and_shows_memory(script: str) -> None:
    text = run("check", script, "--mesh", TWO).stdout
    assert "4 devices, 2 microbatches" in text
    assert "verified" in text
    assert "peak" in text
    found = run_json("check", script, "--mesh", TWO)
    assert found["devices"] == [0, 1, 2, 3]
    program = job_in(Path(script)).compile(meshed(TWO))
    assert [m["peak_bytes"] for m in found["memory"]] == [m.peak for m in program.memory]
    assert [sum(m["at_peak"].values()) for m in found["memory"]] == [m.peak for m in program.memory]
    assert [t["bytes"] for t in found["traffic"]] == [t.nbytes for t in program.traffic]


def test_check_reads_strategies_from_files(script: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(meshed(TWO).to_json()))
    assert run_json("check", script, "--strategy", path)["plans"] == 2


@pytest.mark.slow
def test_verify_compares_with_plain_pytorch(script: str, tmp_path: Path) -> None:
    text = run("verify", script, "--mesh", TWO, "--steps", 1).stdout
    assert text.startswith("equal up to reduction order: largest difference ")
    path = tmp_path / "counts_rows.py"
    path.write_text(Path(script).read_text().replace("x = x + torch", "x = x + len(x) * torch"))
    found = run_json("verify", path, "--mesh", TWO, "--steps", 1, code=1)
    assert (found["equal"], found["parted"]) == (False, "the forward of layers.1")


def test_check_refuses_what_does_not_fit(script: str) -> None:
    assert "fits" in run("check", script, "-m", TWO, "--memory-limit", "1MiB").stdout
    found = run("check", script, "-m", TWO, "--memory-limit", "512B", code=1)
    assert "memory_limit=512 is not enough" in found.stderr
    error = run_json("check", script, "-m", TWO, "--memory-limit", "512B", code=1)["error"]
    assert error["kind"] == "DirectiveError"


SAME = [
    m
    for m in MISTAKES
    if m.model() == Mistake("", m.wrong, ()).model()
    and not m.name.startswith(("no match", "counts", "two levels"))
    and "EP" not in str(m.wrong)
    and m.name != "not expert-major"
]
"""Mistakes from the compiler's own table that are possible on a plain chain of layers."""
KINDS = {type(m.wrong).__name__: m for m in SAME}


def refused(script: str, mistake: Mistake, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    written = [directive.to_json() for directive in [*mistake.after, mistake.wrong]]
    path.write_text(json.dumps(written, default=str))
    found = run("check", script, "--strategy", path, code=1)
    text = " ".join(found.stderr.split())
    assert text.startswith("error: ")
    assert all(" ".join(part.split()) in text for part in mistake.says)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_check_prints_what_the_table_of_errors_promises(
    kind: str, script: str, tmp_path: Path
) -> None:
    refused(script, KINDS[kind], tmp_path)


@pytest.mark.cases(fast=0, slow=5)
@pytest.mark.parametrize("mistake", SAME, ids=lambda m: m.name)
def test_check_prints_all_of_the_table(mistake: Mistake, script: str, tmp_path: Path) -> None:
    refused(script, mistake, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "pp"], "'pp' is not of the form name=value"),
        (["--mesh", "pipelines=2"], "mesh() has no argument 'pipelines'"),
        (["--mesh", "pp=2,dp=3,ep=2"], "ep=2 does not divide"),
        (["--mesh", "pp=2,schedule=nine"], "nine"),
        ([], "the job has no strategy"),
        (["--strategy", "nowhere.json"], "nowhere.json"),
        (["--strategy", "nowhere.json", "--mesh", "pp=2"], "not both"),
        (["--mesh", "pp=2", "--memory-limit", "much"], "'much' is not a valid size"),
    ],
)
def test_what_is_wrong_is_said_without_a_trace(
    arguments: list[str], says: str, script: str
) -> None:
    found = run("check", script, *arguments, code=1)
    assert says in " ".join(found.stderr.split())
    assert "Traceback" not in found.output
    assert says in run_json("check", script, *arguments, code=1)["error"]["message"]


def test_scripts_without_a_job_are_refused(tmp_path: Path) -> None:
    for name, text, says in (
        ("none.py", "", "defines no job"),
        ("other.py", "job = 3", "found int"),
        ("made.py", "def job(): return 3", "found int"),
    ):
        (tmp_path / name).write_text(text)
        assert says in " ".join(run("check", tmp_path / name, code=1).stderr.split())
    assert "there is no script" in run("check", tmp_path / "nowhere.py", code=1).stderr
    run("check", code=2)
    run("fly", code=2)


# --- show, simulate, compare ---------------------------------------------------------------------


def test_show_draws_the_grid_and_writes_pages(script: str, tmp_path: Path) -> None:
    grid = run("show", script, "-m", TWO).stdout
    assert "device 0,1" in grid
    assert "idle" in grid
    pages = tmp_path / "t.html", tmp_path / "d.html"
    found = run("show", script, "-m", TWO, "--timeline", pages[0], "--dag", pages[1])
    assert all(str(page.name) in "".join(found.stderr.split()) for page in pages)
    assert all(page.read_text().startswith("<!doctype html>") for page in pages)
    assert "plan of devices" in run("show", script, "-m", TWO, "--text").stdout
    assert len(run_json("show", script, "-m", TWO)["schedule"]) == 2


@pytest.mark.slow
def test_simulate_on_a_file_and_on_a_name(script: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(piper.Cluster.of("H100", 4).to_toml())
    trace = tmp_path / "trace.json"
    one = run_json("simulate", script, "-m", TWO, "--cluster", path, "--trace", trace)
    other = run_json("simulate", script, "-m", TWO, "--cluster", "4xH100")
    assert one["seconds"] == other["seconds"] > 0
    assert json.loads(trace.read_text())["traceEvents"]
    text = run("simulate", script, "-m", TWO, "--cluster", "2x2xA100-80").stdout
    assert "MFU" in text
    assert "bubble" in text
    assert "up to number 3" in run("simulate", script, "-m", TWO, "-c", "2xH100", code=1).stderr
    assert "no device 'H1'" in run("simulate", script, "-m", TWO, "-c", "8xH1", code=1).stderr


def test_a_saved_program_can_be_shown_again(script: str, tmp_path: Path) -> None:
    job_in(Path(script)).compile(meshed(TWO)).save(tmp_path / "program")
    one = run_json("simulate", tmp_path / "program", "-c", "4xH100")
    assert one["seconds"] == run_json("simulate", script, "-m", TWO, "-c", "4xH100")["seconds"]
    found = run("check", tmp_path / "program", "-m", TWO, code=1)
    assert "whose strategy is fixed" in " ".join(found.stderr.split())
    run("check", tmp_path / "program", "--memory-limit", "512B", code=1)


@pytest.mark.slow
def test_compare_strategies_and_results(script: str, tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(mesh(pp=2, schedule="gpipe", microbatches=2).to_json()))
    b.write_text(json.dumps(mesh(pp=2, schedule="1f1b", microbatches=4).to_json()))
    page = tmp_path / "both.html"
    where = ("--script", script, "--cluster", "2xH100")
    assert "second / first" in run("compare", a, b, *where, "--timeline", page).stdout
    assert page.exists()
    found = run_json("compare", a, b, *where)
    assert found["second_over_first"]["seconds"] == pytest.approx(
        found["second"]["seconds"] / found["first"]["seconds"]
    )
    for path, key in ((a, "first"), (b, "second")):
        path.write_text(json.dumps(found[key]))
    assert run_json("compare", a, b) == found
    assert "figures only" in run("compare", a, b, "--timeline", page, code=1).stderr
    a.write_text(json.dumps(mesh(pp=2).to_json()))
    assert "--script" in run("compare", a, b, code=1).stderr


# --- profile and train ---------------------------------------------------------------------------


def test_profile_writes_all_there_is(script: str, tmp_path: Path) -> None:
    page, trace, costs = tmp_path / "t.html", tmp_path / "t.json", tmp_path / "c.json"
    files = ("--timeline", page, "--trace", trace, "--costs", costs)
    found = run_json("profile", script, "-m", TWO, "--kernels", *files, "-c", "4xCPU")
    assert len(found["steps_seconds"]) == 3
    assert set(found["devices"]) == {"0", "1", "2", "3"}
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert any("addmm" in e["name"] or "mm" in e["name"] for e in kernels)
    assert all(e["name"].startswith(e["args"]["node"]) for e in kernels)
    again = run_json("simulate", script, "-m", "pp=2", "-c", "2xCPU", "--profile", costs)
    assert again["seconds"] > 0
    assert page.exists()


def test_training_goes_on_where_it_was_saved(script: str, tmp_path: Path) -> None:
    state = tmp_path / "state.pt"
    lines = run("train", script, "-m", TWO, "--json").stdout.splitlines()
    whole = [json.loads(line)["loss"] for line in lines]
    assert len(whole) == 6  # until the batches end
    first = run("train", script, "-m", TWO, "--steps", 3, "--save", state, "--json")
    then = run("train", script, "-m", "pp=2,microbatches=2", "--load", state, "--json")
    losses = [json.loads(x) for x in (*first.stdout.splitlines(), *then.stdout.splitlines())]
    assert [x["step"] for x in losses] == [1, 2, 3, 4, 5, 6]
    assert [x["loss"] for x in losses] == pytest.approx(whole, rel=1e-6)
    assert run("train", script, "-m", TWO, "--steps", 1).stdout.startswith("1 step in ")


@pytest.mark.slow
def test_more_steps_than_batches_are_another_pass(script: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    lines = run("train", script, "-m", TWO, "--steps", 9, "--json").stdout.splitlines()
    whole = [json.loads(line) for line in lines]
    assert [x["step"] for x in whole] == list(range(1, 10))  # from six batches
    run("train", script, "-m", TWO, "--save", state)
    then = run("train", script, "-m", TWO, "--load", state, "--steps", 9, "--json")
    losses = [json.loads(line)["loss"] for line in then.stdout.splitlines()]
    assert losses == pytest.approx([x["loss"] for x in whole[6:]], rel=1e-6)
    with pytest.warns(PiperWarning, match="resumed from step 6, and there the batches ended"):
        run("train", script, "-m", TWO, "--load", state)


def test_a_checkpoint_without_a_position_counts_the_steps_of_all_passes(
    script: str, tmp_path: Path
) -> None:
    whole = losses(script, "--steps", 12)
    job = job_in(Path(script))
    with piper.launch(job.compile(meshed(TWO))) as trainer:
        trainer.fit(job.batches, steps=8, progress=False)
        trainer.save(tmp_path / "state")
    found = losses(script, "--load", tmp_path / "state", "--epochs", 2)
    assert found == pytest.approx(whole[8:], rel=1e-6)


@pytest.mark.cases(fast=1, slow=1)
@pytest.mark.parametrize(("wrong", "code"), [("raise KeyboardInterrupt", 130), ("x = x[:3]", 1)])
def test_a_run_that_is_stopped_keeps_its_last_whole_step(
    wrong: str, code: int, script: str, tmp_path: Path
) -> None:
    state, path = tmp_path / "state", tmp_path / "stopped_job.py"
    drawn = "x = torch.randn(8, 4, generator=generator)\n"
    path.write_text(SCRIPT.replace(drawn, f"{drawn}        if _ == 4: {wrong}\n"))
    found = run("train", path, "-m", TWO, "--every", 3, "--save", state, code=code)
    assert f"stopped after step 4: saved {state}/step-00000004" in found.stderr
    rest = losses(script, "--resume", state)
    assert rest == pytest.approx(losses(script)[4:], rel=1e-6)
    said = run("train", path, "-m", TWO, code=code).stderr
    assert "stopped after step 4; nothing is saved" in said


@pytest.mark.slow
def test_new_settings_are_those_of_the_job(script: str, tmp_path: Path) -> None:
    state, path = tmp_path / "state", tmp_path / "slower_job.py"
    path.write_text(SCRIPT.replace("lr=1e-2", "lr=1e-3"))
    run("train", script, "-m", TWO, "--steps", 2, "--save", state)
    with pytest.warns(
        PiperWarning, match=r"lr=0\.01 \(given 0\.001\).*--new-settings to piper train"
    ):
        restored = losses(path, "--load", state)
    assert restored == losses(script, "--load", state)
    with warnings.catch_warnings(action="error", category=PiperWarning):
        assert losses(path, "--load", state, "--new-settings")[1:] != restored[1:]


def test_a_loader_with_a_smaller_last_batch_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "uneven_job.py"
    loader = "torch.utils.data.DataLoader([(torch.ones(4),) * 2] * 11, 8)"
    path.write_text(SCRIPT.replace("batches=batches", f"batches={loader}"))
    found = run("train", path, "-m", TWO, code=1)
    assert "drop the last, smaller batch" in found.stderr
    assert "step 1" not in found.stderr


@pytest.mark.slow
def test_steps_and_epochs_count_the_whole_run(script: str, tmp_path: Path) -> None:
    state, other = tmp_path / "state", tmp_path / "other"
    how = ("train", script, "-m", TWO)
    run(*how, "--steps", 2, "--resume", state)  # begins it
    said = run(*how, "--steps", 3, "--resume", state).stderr
    assert said.startswith(f"resumed from {state}/step-00000002\nstep 3 of 3: loss ")
    whole = losses(script, "--epochs", 2)
    assert losses(script, "--epochs", 2, "--load", state, "--save", other) == pytest.approx(
        whole[3:], rel=1e-6
    )
    assert [p.name for p in other.iterdir()] == ["step-00000012"]
    assert "reached step 12" in run(*how, "--save", other, code=1).stderr
    assert "--save or --resume" in run(*how, "--save", other, "--resume", other, code=1).stderr


def test_lines_and_checkpoints_have_intervals_of_their_own(script: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    more = ("--every", 2, "--keep", 2, "--log-every", 4, "--steps", 5)
    found = run("train", script, "-m", TWO, "--save", state, *more)
    assert re.findall(r"^step (\d+) of 5", found.stderr, re.M) == ["4", "5"]
    assert sorted(p.name for p in state.iterdir()) == ["step-00000004", "step-00000005"]
    assert f"state after step 5: {state}" in found.stderr
    found = run("train", script, "-m", TWO, "--steps", 2)
    assert re.findall(r"^step (\d+)", found.stderr, re.M) == ["1", "2"]
    assert "nothing is saved: --save keeps the state, --export the model" in found.stderr


@pytest.mark.slow
def test_a_job_pads_its_batches_or_takes_other_shapes(tmp_path: Path) -> None:
    path = tmp_path / "ragged_job.py"
    ragged = SCRIPT.replace("yield x, x", "x = x[: 8 - 4 * (_ % 2)]\n        yield x, x")
    path.write_text(ragged)
    assert "stopped after step 1;" in run("train", path, "-m", TWO, code=1).stderr
    path.write_text(ragged.replace("batches=batches", "batches=batches, shapes=1"))
    apart = losses(path)
    counted = (
        "def counted(y, x):\n"
        "    own = ~x.isnan()\n"
        "    return ((y - x.nan_to_num()) ** 2 * own).sum(), own.sum()\n"
    )
    given = ragged.replace("nn.functional.mse_loss", "counted")
    given = given.replace("batches=batches", "batches=batches, pad=(0.0, float('nan'))")
    path.write_text(given + counted)
    assert losses(path) == pytest.approx(apart, rel=1e-5)
    assert len(apart) == 6


def test_a_run_exports_its_model(script: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    found = run("train", script, "-m", TWO, "--steps", 1, "--export", folder)
    assert f"model: {folder}" in found.stderr
    assert "nothing is saved" not in found.stderr
    assert {"embed.weight", "head.bias"} <= set(load_file(folder / "model.safetensors"))


def test_epochs_and_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "epochs_job.py"
    path.write_text(
        SCRIPT.replace("batches=batches", "batches=batches, held_out=lambda: list(batches())[:2]")
    )
    lines = run("train", path, "-m", TWO, "--epochs", 2, "--json").stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert [x["step"] for x in found if "step" in x] == list(range(1, 13))
    assert [x["evaluated_after"] for x in found if "step" not in x] == [6, 12]
    said = run("train", path, "-m", TWO, "--steps", 3, "--evaluate-every", 2).stderr
    assert re.findall(r"evaluation after step (\d+): loss \d\.\d{4}", said) == ["2", "3"]


def test_batches_may_be_a_loader(tmp_path: Path) -> None:
    path = tmp_path / "loader_job.py"
    path.write_text(SCRIPT.replace("batches=batches", "batches=list(batches())"))
    assert "step 2 of 2: loss" in run("train", path, "-m", TWO, "--steps", 2).stderr


def test_a_run_that_fails_has_a_code_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "failing_job.py"
    broken = "def batches():\n    yield torch.full((8, 4), float('nan')), torch.zeros(8, 4)\n"
    wrong = "optimizer=lambda params: Failing(params)"
    text = SCRIPT.replace("optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2)", wrong)
    text += broken + (
        "class Failing(torch.optim.SGD):\n"
        "    steps = 0\n"
        "    def __init__(self, params):\n"
        "        super().__init__(params, lr=0.1)\n"
        "    def step(self, closure=None):\n"
        "        if all(p.numel() > 4 * 4 * 8 for g in self.param_groups for p in g['params']):\n"
        "            return super().step()\n"
        "        if any(p.grad is not None and p.grad.isnan().any()\n"
        "               for g in self.param_groups for p in g['params']):\n"
        "            raise ValueError('no numbers')\n"
        "        return super().step()\n"
    )
    path.write_text(text)
    found = run("train", path, "-m", TWO, code=3)
    assert "no numbers" in found.stderr
    assert run_json("train", path, "-m", TWO, code=3)["error"]["kind"] == "InstructionError"


@pytest.mark.slow
def test_the_program_itself_on_processes(script: str, tmp_path: Path) -> None:
    """As installed: in its own process, with workers."""
    command = [sys.executable, "-m", "piper", "train", script, "--mesh", "pp=2,microbatches=2"]
    done = subprocess.run(
        [*command, "--on", "processes", "--steps", "2", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in done.stdout.splitlines()]
    here = run("train", script, "-m", "pp=2,microbatches=2", "--steps", 2, "--json").stdout
    assert losses == [json.loads(line)["loss"] for line in here.splitlines()]


def test_it_is_a_program() -> None:
    command = [sys.executable, "-m", "piper", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert re.fullmatch(r"\d+\.\d+\.\d+", done.stdout.strip())


# --- cache ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_cache_is_shown_and_cleared(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a [red] cache"
    monkeypatch.setenv("PIPER_CACHE", str(folder))

    def said(*arguments: object) -> str:
        return " ".join(run("cache", *arguments).stdout.split())

    assert said("--clear").endswith("a [red] cache/programs-1: 0 programs, 0 B")
    for spec in (TWO, TWO, "pp=2,microbatches=2", "dp=2,microbatches=2"):  # the first one warms up
        run("check", script, "-m", spec)
    assert "Net, 4 devices" in said()
    found = run_json("cache")
    assert sorted(x["program"] for x in found["entries"]) == [
        *["Net, 2 devices"] * 2,
        "Net, 4 devices",
    ]
    assert all(x["bytes"] > 0 <= x["seconds_unused"] for x in found["entries"])
    old, damaged, _ = sorted((folder / "programs-1").iterdir())
    os.utime(old / "checksums.json", (time.time() - 3 * 86400,) * 2)
    (damaged / "checksums.json").unlink()
    (damaged / "cached.json").write_text("{")
    assert "cannot be read" in said()
    assert "1 program, " in said("--days", 2)
    assert "1 program, " in (text := said("--days", 2, "--clear"))
    assert text.endswith("removed")
    assert len(run_json("cache")["entries"]) == 2
    assert run_json("cache", "--clear")["removed"] is True
    assert run_json("cache", "--clear") == {"entries": [], "removed": False}
    assert not list((folder / "programs-1").iterdir())
    run("cache", "--days", -1, code=2)
    monkeypatch.setenv("PIPER_CACHE", "off")
    assert said("--clear") == "the cache is off"


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GiB", 80 * 2**30), ("1.5 mb", 1_500_000), ("12", 12), ("2K", 2048), (80e9, 80 * 10**9)],
)
def test_sizes(text: str | float, nbytes: int) -> None:
    assert nbytes_of("--memory-limit", text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5min", 300), ("1.5 h", 5400), ("250ms", 0.25), ("12", 12), (0.5, 0.5)],
)
def test_times(text: str | float, seconds: float) -> None:
    assert seconds_of("timeout", text) == seconds


@pytest.mark.parametrize("wrong", ["soon", "", "5 fortnights", 0, -1, True, None])
def test_a_wrong_time_is_refused(wrong: object) -> None:
    with pytest.raises(PiperError, match=r"timeout=.* is not a valid time: give seconds, or"):
        seconds_of("timeout", wrong)


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    tied: bool = False


def settled(
    lr: float = 0.1,
    model: Shape = Shape(),  # noqa: B008 - a frozen record, as a job declares it
    name: str | None = None,
    sizes: tuple[int, ...] = (1, 2),
    tables: Mapping[str, int] = {"a": 1},
    where: Where = Where.VIRTUAL,
) -> list[Any]:
    return [lr, model, name, sizes, tables, where]


def test_settings_have_the_types_of_the_defaults() -> None:
    given = ["lr=1e-4", "model.layers=8", "model.tied=true", "name=x=y", "sizes=[3, 4]"]
    found = job_with(settled, [*given, "tables.a=5", "where=processes"])
    assert found == [1e-4, Shape(8, True), "x=y", (3, 4), {"a": 5}, Where.PROCESSES]
    assert job_with(settled, []) == settled()
    written = re.findall("--set (.*)", settings_text(settled))
    assert written.pop(3) == "name=None"
    assert written[-2:] == ["tables.a=1", "where=virtual"]
    assert job_with(settled, written) == settled()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("lrr=1", r"no such setting: did you mean lr\? The settings of this job are lr=0.1, model"),
        ("model.layer=1", r"did you mean model.layers\?"),
        ("lr.x=1", "no such setting"),
        ("model.layers=two", "'two' is not a valid int"),
        ("model.tied=perhaps", r"'perhaps' is not a valid bool \(write true or false\)"),
        ("lr", "write name=value. The settings of this job are lr=0.1"),
    ],
)
def test_wrong_settings_are_refused(given: str, says: str) -> None:
    with pytest.raises(PiperError, match=f"--set {given}: .*{says}"):
        job_with(settled, [given])


def test_train_takes_settings(tmp_path: Path) -> None:
    path = tmp_path / "set_job.py"
    given = SCRIPT.replace("lr=1e-2)", "lr=lr)").replace("def job():", "def job(lr=1e-2):")
    path.write_text(given)
    how = ["-m", "dp=1", "--steps", 2, "--device", "cpu", "--json"]
    losses = [
        [json.loads(line)["loss"] for line in run("train", path, *how, *more).stdout.splitlines()]
        for more in (["--set", "lr=0"], [])
    ]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]
    assert run("train", path, "--help").stdout.strip().endswith("defaults:\n  --set lr=0.01")
    path.write_text(SCRIPT)
    assert "nothing to set" in run("train", "--help", path).stdout
    path.write_text(SCRIPT + "\njob = job()\n")
    assert "defines no function `job`" in run("train", path, "--help").stdout
    for command in ("train", "check"):
        assert "finished Job" in run(command, path, "--set", "lr=1", code=1).stderr
    words = " ".join(run("train", path, "--set", "lr=1", code=1).stderr.split())
    assert "defines 'job' as a finished Job" in words


def test_clusters_by_name() -> None:
    assert len(cluster_of("8xH100")) == 8
    assert len(cluster_of("4x8xH200").machines) == 4
    assert cluster_of("2xMI300X").device(0).name == "MI300X"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], None),
        (["--version"], None),
        (["train", "--help"], None),
        ([], "piper "),
        ([], "piper train --s"),
        ([], "piper demo --"),
    ],
)
def test_help_and_completion_do_not_import_torch(arguments: list[str], words: str | None) -> None:
    code = (
        "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
        f"sys.argv = ['piper', *{arguments}]; from piper.cli.app import main; main()"
    )
    environment = dict(os.environ)
    if words is not None:
        position = str(len(words.split(" ")) - 1)
        environment |= {"_PIPER_COMPLETE": "complete_bash", "COMP_WORDS": words}
        environment["COMP_CWORD"] = position
    run = [sys.executable, "-c", code]
    printed = subprocess.run(run, env=environment, check=True, capture_output=True, text=True)
    *shown, imported = printed.stdout.split()
    assert shown
    assert imported == "False"
