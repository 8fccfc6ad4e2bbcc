"""Training under ``torchrun``: every process gets the numbers of virtual devices, bit for bit.

Processes take seconds to start, so one set of four processes trains under all strategies in turn.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import piper
from tests.scripts import one_compiles, resumed
from tests.scripts.cases import ON_FOUR, ON_ONE, ON_TWO, batches, differences, numbers
from tests.scripts.fault_at import Fault, chosen
from tests.scripts.kills import seen
from tests.training import shared_captures

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIMIT = 300
"""Seconds after which a run counts as hanging."""


@contextmanager
def torchrun(
    processes: int, script: str, *args: object, restarts: int = 0, fault: str | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a script of ``tests/scripts`` under torchrun, or a module ("-m piper"); kill what is left
    of it at the end."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--max-restarts={restarts}"]
    found = subprocess.Popen(
        [
            sys.executable,
            *torchrun,
            "--nproc-per-node",
            str(processes),
            *script.split(),
            *map(str, args),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **({} if fault is None else {"FAULT_AT": fault}),
        },
        cwd=ROOT / "tests" / "scripts",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield found
    finally:
        if found.poll() is None:
            os.killpg(found.pid, signal.SIGKILL)
            found.communicate()


def test_many_strategies_on_four_processes(tmp_path: Path) -> None:
    with shared_captures():
        programs = [case.compile() for case in ON_FOUR.values()]
    for i, program in enumerate(programs):
        program.save(tmp_path / str(i))
    ON_ONE.compile().save(tmp_path / "wrong")
    *others, last = programs
    with piper.launch(last) as trainer:
        trainer.step(*batches()[1])
        trainer.save(tmp_path / "before")
    with torchrun(4, "replay.py", tmp_path) as run:
        expected = [numbers_on_virtual_devices(program) for program in others]
        with piper.launch(last) as trainer:
            trainer.load(tmp_path / "before")
            expected.append(numbers(trainer))
            _, errors = run.communicate(timeout=LIMIT)
            assert not run.returncode, errors
            after = trainer.step(*batches()[0]).loss
            trainer.load(tmp_path / "after")
            assert torch.equal(trainer.step(*batches()[0]).loss, after)
    wrong = []
    for rank in range(4):
        found = torch.load(tmp_path / f"numbers.{rank}")
        for name, should in zip(ON_FOUR, expected, strict=True):
            if names := differences(found[name], should):
                wrong.append(f"{name}, process {rank}: {', '.join(names)}")
        assert (tmp_path / f"refused.{rank}").read_text() == (
            "the program runs on 1 device, but torchrun started 4 processes: use --nproc-per-node "
            "and --nnodes so that they are as many"
        )
    assert not wrong, "\n".join(wrong)


def numbers_on_virtual_devices(program: piper.Program) -> dict[str, torch.Tensor]:
    with piper.launch(program) as trainer:
        return numbers(trainer)


def test_a_script_that_compiles_trains_and_fails() -> None:
    with torchrun(2, "user.py") as run:
        program = ON_TWO["experts, ZeRO-3, counted, clipped"].compile()
        with piper.launch(program) as trainer:
            losses = [float(trainer.step(*batch).loss).hex() for batch in batches()]
        output, errors = run.communicate(timeout=LIMIT)
    found = [line.split() for line in output.splitlines()]
    for rank in range(2):
        assert [loss for r, loss in found if r == str(rank)] == [*losses, *losses], errors
    assert run.returncode == 1
    assert "instruction" in errors
    assert "ToldToFailError: told to fail" in errors


def test_rank_zero_compiles_for_all(tmp_path: Path) -> None:
    """Steps, evaluations, shapes, a switch, checkpoints: another rank compiles nothing for them.
    It does when it asks for more, or when rank 0 alone has compiled another program before."""
    with torchrun(2, "one_compiles.py", tmp_path) as run:
        pipeline, replicas = one_compiles.programs()
        with piper.launch(pipeline, shapes=1) as trainer:
            expected = one_compiles.trained(trainer, replicas, tmp_path / "virtual")
        _, errors = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, errors
    first, second = (torch.load(tmp_path / f"found.{rank}") for rank in (0, 1))
    for found in (first, second):
        assert found["losses"] == expected["losses"]
        for what in ("state", "outputs"):
            assert found[what].keys() == expected[what].keys()
            assert all(torch.equal(x, expected[what][name]) for name, x in found[what].items())
        assert found["text"] == pipeline.text()
        assert "does not divide over 2 devices" in found["words"].pop("an error")
        assert "of another model, which has 0.embed.weight" in found["words"].pop("switch")
        assert not found["words"]
        assert found["after"]
    assert first["compiled"] == [True] * 3
    assert second["compiled"] == [False] * 3


def test_a_script_without_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    program = ON_ONE.compile()
    with pytest.raises(piper.PiperError, match="start the script with torchrun"):
        piper.launch(program, on="torchrun")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(piper.PiperError, match="needs WORLD_SIZE, MASTER_ADDR"):
        piper.launch(program, on="torchrun")


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.parametrize("kind", [Fault.STOP, Fault.KILL, Fault.RAISE, Fault.EXIT, Fault.MEMORY])
def test_restarted_ranks_continue(kind: Fault, tmp_path: Path) -> None:
    """After a fault torchrun starts all ranks again, and ``resume`` continues with the losses of a
    run without it."""
    fault = chosen(1, 5, 3, kind, str(tmp_path / "happened"))
    with torchrun(4, "resumed.py", tmp_path, "torchrun", 8, restarts=1, fault=fault) as run:
        with piper.launch(resumed.compiled(4)) as trainer:
            losses = trainer.iterate(resumed.batch, steps=8, progress=False)
            expected = {i: float(one.loss).hex() for i, one in enumerate(losses, start=1)}
        _, errors = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, errors
    for rank in range(4):
        assert seen(tmp_path, rank) == expected
    assert (tmp_path / "happened").exists()


@pytest.mark.thorough
def test_a_restarted_command_continues(tmp_path: Path) -> None:
    """Also ``piper train --on torchrun``."""
    fault = chosen(1, 5, 3, Fault.STOP, str(tmp_path / "happened"))
    how = ["--on", "torchrun", "--resume", tmp_path / "run", "--every", 3, "--json"]
    command = ["train", "resumed.py", *how]
    with torchrun(4, "-m piper", *command, restarts=1, fault=fault) as run:
        with piper.launch(resumed.compiled(4)) as trainer:
            losses = trainer.iterate(resumed.batch, steps=8, progress=False)
            expected = {i: float(one.loss) for i, one in enumerate(losses, start=1)}
        output, errors = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, errors
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    found = [(line["step"], line["loss"]) for line in lines if "step" in line]
    assert len(found) > len(expected)  # some steps were repeated
    assert all(expected[step] == loss for step, loss in found)
    assert found[-1][0] == 8


@pytest.mark.thorough
def test_ranks_end_with_torchrun(tmp_path: Path) -> None:
    """torchrun is killed, and started again."""

    def ranks() -> list[Path]:
        given = str(tmp_path).encode()
        return [p for p in Path("/proc").glob("[0-9]*/cmdline") if given in read(p)]

    with torchrun(4, "resumed.py", tmp_path, "torchrun", 10**6) as run:
        deadline = time.monotonic() + LIMIT
        while len(seen(tmp_path)) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        run.kill()
        run.communicate()
        while ranks():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    steps = max(seen(tmp_path)) + 3
    with piper.launch(resumed.compiled(4)) as trainer:
        losses = trainer.iterate(resumed.batch, steps=steps, progress=False)
        expected = {i: float(one.loss).hex() for i, one in enumerate(losses, start=1)}
    with torchrun(4, "resumed.py", tmp_path, "torchrun", steps) as run:
        _, errors = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, errors
    assert all(seen(tmp_path, rank) == expected for rank in range(4))


def read(path: Path) -> bytes:
    """The content of a file, or nothing if it is gone."""
    with suppress(OSError):
        return path.read_bytes()
    return b""
