"""Processes under torchrun that do not mean the same are told so, all of them, before they train to
other numbers or wait for each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from piper.launch.agreeing import of_tensor

ROOT = Path(__file__).parents[1]


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    run = subprocess.run(
        [*command, "2", str(ROOT / "tests" / "scripts" / "disagree.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    first, second = (json.loads((tmp_path / f"told.{rank}.json").read_text()) for rank in (0, 1))
    lost = {name: first.pop(name) for name in ("lost", "lost, state")}
    assert first == second
    assert first.pop("program").startswith(
        "rank 1 has another program than rank 0: its number of devices, its strategy,"
    )
    assert "the first weights differ between ranks 0 and 1: 2.bias; " in first["weights"]
    assert "torch.manual_seed" in first.pop("weights")
    assert first.pop("weights, unchecked") == "nothing"
    assert first.pop("option").startswith("check_batches=-1 must be a number of steps")
    # of the first three and every fifth: step 4, whose rows differ too, is not compared
    assert "ranks 0 and 1 differ: tensor 0 of 2" in first["step 2"]
    assert "DistributedSampler" in first.pop("step 2")
    assert "tensor 1 of 2" in first.pop("step 5")
    assert "ranks 0 and 1 differ" in first.pop("evaluate")
    assert not first
    assert lost["lost"].startswith("CommunicationError: device 0, instruction ")
    assert ") with device 1: " in lost["lost"]
    assert "one of them has ended or hangs" in lost["lost, state"]


def test_every_number_and_its_row_counts() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    labels = torch.arange(4)
    assert of_tensor(x) == of_tensor(x.t().contiguous().t())
    different = [
        x, x.roll(1, 0), x.double(), x.reshape(3, 4), x + 1e-6, x.bfloat16(), x > 0,
        labels, labels.roll(1), torch.zeros(()), torch.zeros(0), torch.zeros(0, 4),
        torch.complex(x, x), torch.complex(x, -x),
    ]  # fmt: skip
    assert len({of_tensor(one) for one in different}) == len(different)
