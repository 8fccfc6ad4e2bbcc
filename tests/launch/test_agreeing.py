"""Ranks under torchrun with different programs, weights or batches all get an error, before they
train to different numbers or wait for each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper import PiperError
from piper.launch.agreement import _refuse_other_rows, of_tensor
from piper.launch.optimizer_facts import OptimizerFacts, difference, facts_of
from piper.runtime.feeding import cut, rows_read

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
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
    differently = "ranks 0 and 1 train differently: "
    for what, words in {
        "kind": "optimizer is SGD on rank 0 and AdamW on rank 1; ",
        "lr": "AdamW's lr is 0.1 on rank 0 and 1.1 on rank 1; ",
        "betas": "AdamW's betas is [0.9, 0.99] on rank 0 and [0.9, 0.999] on rank 1; ",
        "groups": "param group of 2.weight is 1 on rank 0 and 0 on rank 1; ",
        "scheduler": "scheduler is None on rank 0 and LambdaLR on rank 1; ",
        "rates": "learning rate in step 5 is [0.1] on rank 0 and [0.05] on rank 1; ",
        "lr, later": "lr of param group 0 is 0.1 on rank 0 and 0.05 on rank 1; ",
    }.items():
        assert first[what].startswith(differently + words), what
        assert first.pop(what).endswith("so let nothing of them depend on the rank")
    assert first.pop("loaded").startswith(
        "the state dicts of ranks 0 and 1 differ, and nothing has changed: 2.bias; under torchrun"
    )
    assert ", and nothing has changed: 0.weight; " in first.pop("loaded, some")
    assert first.pop("loaded, nothing") == "True"
    assert "the first weights differ between ranks 0 and 1: 2.bias; " in first["weights"]
    assert "torch.manual_seed" in first.pop("weights")
    assert first.pop("weights, unchecked") == "nothing"
    assert first.pop("option").startswith("check_batches=-1 must be a whole number")
    # of the first three and every fifth: step 4, whose rows differ too, is not compared
    assert "ranks 0 and 1 differ: tensor 0 of 2" in first["step 2"]
    assert "DistributedSampler" in first.pop("step 2")
    assert "tensor 1 of 2" in first.pop("step 5")
    assert "ranks 0 and 1 differ" in first.pop("evaluate")
    assert first.pop("rows, mixed").startswith(
        "rank 0 gives its own rows of the batch (rows=True), and rank 1 a whole one"
    )
    assert first.pop("rows, all").endswith(
        "With rows=True a batch has 4 rows here: those of trainer.rows, in this order"
    )
    assert first.pop("rows") == "4 True True True 32"
    assert not first
    assert lost["lost"].startswith("CommunicationError: device 0, instruction ")
    assert ") with device 1: " in lost["lost"]
    assert "one of them has ended or hangs" in lost["lost, state"]


def test_rows_that_two_ranks_have_must_be_the_same() -> None:
    agreed = [[{0: 5, 1: 6}, {0: 1}], [{1: 6, 2: 7}, {0: 1}]]
    _refuse_other_rows(agreed)
    with pytest.raises(PiperError, match="row 1 of the batch differs between ranks 0 and 2, in "):
        _refuse_other_rows([*agreed, [{1: 8}, {}]])


def test_every_row_is_read_by_somebody() -> None:
    """Two stages, each on two devices: a process needs the rows of one device, half of each
    microbatch."""
    strategy = piper.strategies.mesh(pp=2, dp=2, schedule="1f1b", microbatches=2)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.arange(32.0).reshape(8, 4)
    program = piper.compile(
        layers, strategy, inputs=(x,), targets=(x,), loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), tags={"*": "layer"},
    )  # fmt: skip
    code = program.training_step.code
    rows = {d: rows_read(program.plan_of(d), code, d) for d in program.devices}
    assert sorted(map(sorted, rows.values())) == [[0, 1, 4, 5]] * 2 + [[2, 3, 6, 7]] * 2
    for device in program.devices:
        plan, mine = program.plan_of(device), sorted(rows[device])
        whole = cut(plan, code, device, [x, -x])
        own = cut(plan, code, device, [x[mine], -x[mine]], mine)
        assert whole
        assert all(map(torch.equal, whole, own))
    with piper.launch(program) as trainer:
        assert trainer.rows.tolist() == list(range(8))
        assert torch.equal(trainer.evaluate(x, x, rows=True).loss, trainer.evaluate(x, x).loss)
        with pytest.raises(PiperError, match=r"pad the batch before taking trainer\.rows"):
            trainer.step(x, x, rows=True, pad=(0, 0))


def test_what_an_optimizer_does_is_compared_and_not_its_code() -> None:
    """Each program is made by new functions: only what the functions do may differ."""
    x = torch.zeros(4, 4)
    strategy = piper.Strategy([piper.place({}, devices=[0])])
    program = piper.compile(
        nn.Linear(4, 4), strategy, inputs=(x,), targets=(x,), loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip

    def facts(lr: float, last: int, **own: Any) -> OptimizerFacts:
        def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, lr=lr)
            vars(optimizer).update(own)
            return optimizer

        def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < last))

        training = replace(program.training, optimizer=make, scheduler=schedule)
        return facts_of(replace(program, training=training))

    first = facts(0.1, 50)
    assert difference(first, facts(0.1, 50)) is None
    assert difference(first, facts(0.2, 50)) == ("SGD's lr", 0.1, 0.2)
    assert difference(first, facts(0.1, 60)) == ("learning rate in step 51", [0.0], [0.1])
    assert difference(first, facts(0.1, 50, trust=3)) == ("SGD's trust", None, 3)


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
