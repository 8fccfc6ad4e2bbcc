"""The same step on virtual devices, in processes and under torchrun; and a worker that dies."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import piper
from piper.ir.plan.instructions import Verb
from piper.models import MoEConfig, MoETransformer, lm_loss

ROOT = Path(__file__).parents[2]
CONFIG = MoEConfig(
    vocab=32, dim=8, heads=2, mlp_dim=8, max_seq=4, layers=2, experts=2, top_k=1, dropout=0.1
)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch(seed: int) -> torch.Tensor:
    return torch.randint(32, (8, 4), generator=torch.Generator().manual_seed(seed))


def model() -> MoETransformer:
    torch.manual_seed(0)
    return MoETransformer(CONFIG)


@functools.cache
def compiled(zero: int) -> piper.Program:
    """Two stages of two devices, in reverse order in one of them; sharded experts."""
    strategy = piper.Strategy(
        [
            piper.partition("layer", into="PP", parts=2),
            piper.split(parts=2),
            piper.place({"PP": 0}, devices=[0, 2]),
            piper.place({"PP": 1}, devices=[3, 1]),
            piper.replicate({"EP": "-"}, zero=zero, bucket_mb=0.001),
            piper.shard({"EP": "*"}),
        ]
    )
    x = batch(0)
    return piper.compile(
        model(),
        strategy,
        inputs=(x,),
        targets=(x,),
        loss=lm_loss,
        optimizer=sgd,
        clip_norm=0.5,
    )


def trained(trainer: piper.Trainer, steps: int = 3) -> list[torch.Tensor]:
    """All results of some steps, and the state after them."""
    found = []
    for step in range(steps):
        result = trainer.step(batch(step), batch(step))
        assert result.grad_norm is not None
        found += [result.loss, result.grad_norm, trainer.evaluate(batch(9), batch(9)).loss]
    return found + list(trainer.state_dict().values())


def train_on(trainer: piper.Trainer) -> None:
    """Train until an error is raised."""
    for step in range(100_000):
        trainer.step(batch(step), batch(step))


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_profiled(trainer: piper.Trainer, program: piper.Program) -> None:
    """A profiled step trains; its profile has every instruction of every device except frees."""
    steps = trainer.steps
    profile = trainer.profile(batch(0), batch(0), steps=2, kernels=True)
    assert trainer.steps == steps + 2
    assert len(profile.steps) == 2
    assert set(profile.kernels) == set(program.devices)
    for device, kernels in profile.kernels.items():
        instructions = program.plan_of(device).instructions
        spans = {one.pc: one for one in profile.measured[device]}
        for one in kernels:  # two clocks, aligned
            if instructions[one.pc].verb is Verb.COMPUTE:
                assert spans[one.pc].start - 0.05 < one.start <= one.end
                assert one.end < spans[one.pc].end + 0.05
    for plan in program.plans:
        for device in plan.devices:
            pcs = [one.pc for one in profile.measured[device]]
            assert pcs == list(range(len(plan.instructions)))
            assert all(
                0 <= one.end - one.start <= profile.seconds for one in profile.measured[device]
            )
    assert 0 <= profile.all_to_all.share <= 1
    assert profile.all_to_all.seconds > 0


@pytest.mark.parametrize(
    ("on", "option", "words"),
    [
        ("virtual", "cuda_graph", r"no option cuda_graph=\. Did you mean cuda_graphs=\? It has: "),
        (
            "virtual",
            "timeout",
            r"no option timeout=\. It has: shapes=, progress=, cuda_graphs=, shake=$",
        ),
        (
            "processes",
            "time_out",
            r"Did you mean timeout=\? It has: .* timeout=, .*start_time",
        ),
        ("torchrun", "check_weight", r"launch\(on='torchrun'\) has .* Did you mean check_weights="),
    ],
)
def test_an_option_that_a_launcher_has_not(on: str, option: str, words: str) -> None:
    with pytest.raises(piper.PiperError, match=words):
        piper.launch(compiled(zero=2), on=on, **{option: 1})


@pytest.mark.slow
def test_processes_equal_virtual_devices_and_a_killed_worker_is_told(tmp_path: Path) -> None:
    program = compiled(zero=2)
    with piper.launch(program) as virtual:
        expected = trained(virtual)
        virtual.save(tmp_path / "state")
        after = trained(virtual)
        assert_profiled(virtual, program)
        profiled = list(virtual.state_dict().values())
    trainer = piper.launch(program, on="processes", timeout=120)
    with trainer:
        assert_same(trained(trainer), expected)
        trainer.load(tmp_path / "state")
        assert_same(trained(trainer), after)
        assert_profiled(trainer, program)
        assert_same(list(trainer.state_dict().values()), profiled)
        group = trainer._session.devices
        workers = [worker.process for worker in group.workers.processes]
        folder = group.workers.folder
        threading.Timer(0.2, os.kill, (workers[2].pid, signal.SIGKILL)).start()
        # at an instruction, or at none if it died between two steps
        with pytest.raises(piper.PiperError, match=r"device 2 died.*SIGKILL"):
            train_on(trainer)
    assert all(worker.poll() is not None for worker in workers)
    assert not folder.exists()


@pytest.mark.slow
def test_torchrun_equals_virtual_devices(tmp_path: Path) -> None:
    program = compiled(zero=3)
    program.save(tmp_path / "program")
    with piper.launch(program) as virtual:
        expected = trained(virtual, steps=2)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, piper\n"
        "from tests.launch.test_launchers import assert_profiled, model, sgd, trained\n"
        "torch.set_num_threads(1)\n"
        "source = piper.Source(model())\n"
        "program = piper.Program.load(sys.argv[2], source=source, optimizer=sgd)\n"
        "with piper.launch(program, on='torchrun') as trainer:\n"
        "    found = trained(trainer, steps=2)\n"
        "    assert_profiled(trainer, program)\n"
        "torch.save(found, sys.argv[1] + '.' + str(torch.distributed.get_rank()))\n"
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    result = subprocess.run(
        [sys.executable, *command, str(script), str(tmp_path / "found"), str(tmp_path / "program")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    for rank in range(4):
        assert_same(torch.load(tmp_path / f"found.{rank}"), expected)


@pytest.mark.slow
def test_without_torchrun_it_is_refused() -> None:
    with pytest.raises(piper.PiperError, match="start the script with torchrun"):
        piper.launch(compiled(zero=0), on="torchrun")


def test_a_rank_whose_torchrun_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    program, x = compiled(zero=0), torch.ones(2, 2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed.getsockname()[1])}
        ranks = {"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "one"}
        for name, value in {**where, **ranks, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(piper.PiperError, match=r"torchrun has ended: nothing answers at 127"):
            piper.launch(program, on="torchrun")
        with pytest.raises(piper.PiperError, match=r"torchrun has ended: nothing answers at 127"):
            piper.compile(torch.nn.Linear(2, 2), piper.Strategy([]), inputs=(x,), loss=torch.sum)
