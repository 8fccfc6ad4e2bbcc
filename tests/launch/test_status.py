"""``piper status``: where workers are, and who waits for whom, seen from another process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import piper
from piper.cli.app import app
from piper.launch.status.seen import HEADER, SeenInstruction, SeenWorker, seen_in
from piper.launch.status.waiting import holding_up, states_of
from piper.runtime.counters import NOWHERE
from tests.scripts.cases import ON_TWO, batches
from tests.scripts.fault_at import Fault, chosen
from tests.scripts.leftovers import grandchildren


def worker(device: int, pc: int, awaited: int = NOWHERE, steps: int = 0) -> SeenWorker:
    """A worker of a pipeline: device 0 sends to device 1, and that to device 2."""
    sends = [SeenInstruction(f"send {i}->{i + 1}", 10 + i, (1 - (i - device),)) for i in range(2)]
    mine = {0: sends[:1], 1: [sends[0]._replace(peers=(0,)), sends[1]._replace(peers=(2,))]}
    rows = mine.get(device, [sends[1]._replace(peers=(1,))])
    plan = (SeenInstruction(f"F stage[{device}]"), *rows, SeenInstruction("update"))
    return SeenWorker(
        "job", device, 3, 8, (pc, 0, awaited, steps, 0, 0, 0, 0), (plan,), os.getpid()
    )


def test_who_holds_up_whom() -> None:
    """Device 2 waits for device 1, which waits for device 0."""
    states = states_of([worker(0, 0), worker(1, 1, 1), worker(2, 1, 1)])
    assert [state.waits_for for state in states] == [(), (0,), (1,)]
    assert [state.worker.device for state in holding_up(states)] == [0]


def test_a_device_that_is_a_step_ahead_is_not_waited_for() -> None:
    """What it sent to device 1 is under way."""
    states = states_of([worker(0, NOWHERE, steps=1), worker(1, 1, 1), worker(2, 1, 1)])
    assert [state.worker.device for state in holding_up(states)] == [1]
    behind = states_of([worker(0, 2, steps=0), worker(1, 1, 1, steps=1)])
    assert behind[1].waits_for == (0,)


def test_what_is_not_whole_is_not_shown() -> None:
    assert seen_in(b"") is None
    assert seen_in(HEADER.pack(0, 0, 0, 0, 0, 0, 0, 5, 0) + b"{") is None


def told(*options: str) -> str:
    result = CliRunner().invoke(app, ["status", *options])
    assert result.exit_code == 0, result.output
    return result.output


def mine() -> dict[str, Any]:
    """The job of this process: others may run on this machine."""
    own = grandchildren()
    jobs = json.loads(told("--json"))["jobs"]
    (job,) = [job for job in jobs if {worker["process"] for worker in job["workers"]} <= own]
    return dict(job)


@pytest.mark.slow
def test_a_job_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = chosen(1, 1, 4, Fault.STOP, str(tmp_path / "happened"))
    monkeypatch.setenv("FAULT_AT", fault)
    program = ON_TWO["stages"].compile()
    imports = ["tests.scripts.fault_at"]
    losses: list[Tensor] = []
    with piper.launch(program, on="processes", threads=1, imports=imports) as trainer:
        trainer.step(*batches()[0])
        assert [worker["instruction"] for worker in mine()["workers"]] == [None, None]
        step = threading.Thread(target=lambda: losses.append(trainer.step(*batches()[1]).loss))
        step.start()
        deadline = time.monotonic() + 60
        while not (job := mine())["held_up_by"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert job["held_up_by"] == [1]
        waiting, stopped = job["workers"]
        plan = program.plan_of(1).instructions
        assert (stopped["step"], stopped["instruction"], stopped["name"]) == (2, 4, plan[4].name)
        assert stopped["stopped"]
        assert waiting["awaited"].startswith("send 1->0")
        assert waiting["waits_for"] == [1]
        assert f"the others wait for device 1, 4 {plan[4].name} (stopped by a signal)" in told()
        told("--html", str(tmp_path / "page.html"))
        assert plan[4].name in (tmp_path / "page.html").read_text()
        os.kill(stopped["process"], signal.SIGCONT)
        step.join()
    with piper.launch(program) as trainer:
        trainer.step(*batches()[0])
        assert torch.equal(losses[0], trainer.step(*batches()[1]).loss)
