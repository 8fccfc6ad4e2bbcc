"""A step happens completely or not at all, whatever interrupts it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import piper
from piper import PiperError
from piper.strategies.directives import replicate
from tests.training import compiled, data_parallel

WIDTH, ROWS = 4, 8
STRATEGY = [*data_parallel(2, 1), replicate({}, zero=0, bucket_mb=1e-4)]


class Pressed(torch.optim.SGD):
    """Sends SIGINT to the main process in the third step of one device."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        super().step()
        if self.calls == 3 and is_first():
            self.press()

    def press(self) -> None:
        os.kill(int(os.environ["PIPER_TEST_MAIN"]), signal.SIGINT)


class Twice(Pressed):
    def press(self) -> None:
        super().press()
        super().press()


class Failing(Pressed):
    def press(self) -> None:
        raise OSError("no more")


def is_first() -> bool:
    """Whether this is the first call in any process since the program was launched. Calls before
    the launch do not count, since compiling tries the optimizer."""
    try:
        Path(os.environ["PIPER_TEST_ONCE"]).unlink()
    except FileNotFoundError:
        return False
    return True


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("PIPER_TEST_MAIN", str(os.getpid()))
    monkeypatch.setenv("PIPER_TEST_ONCE", str(tmp_path / "once"))
    with handled_by(signal.default_int_handler):
        yield tmp_path / "once"


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    usual = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def program(optimizer: Any) -> piper.Program:
    x, y = batch()
    return compiled(model(), STRATEGY, mse_loss, [((x,), (y,))], optimizer=optimizer)


def train(trainer: piper.Trainer, count: int) -> None:
    for _ in range(count):
        trainer.step(*batch())


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def after(count: int) -> dict[str, Tensor]:
    with piper.launch(program(sgd)) as trainer:
        train(trainer, count)
        return trainer.state_dict()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("on", ["virtual", "processes"])
def test_an_interrupt_waits_for_the_end_of_the_step(on: str, once: Path, tmp_path: Path) -> None:
    """The usual ``except KeyboardInterrupt`` saves the state after a complete step."""
    with piper.launch(program(Pressed), on=on) as trainer:
        once.touch()
        with pytest.raises(KeyboardInterrupt):
            train(trainer, 10)
        assert trainer.steps == 3
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        trainer.save(tmp_path / "state")
    with piper.launch(program(Pressed)) as trainer:
        trainer.load(tmp_path / "state")
        assert_equal(trainer.state_dict(), after(3))


def test_a_handler_of_the_users_is_called_when_the_step_is_over(once: Path) -> None:
    seen: list[int] = []
    with piper.launch(program(Pressed)) as trainer:
        once.touch()
        with handled_by(lambda *_: seen.append(trainer.steps)):
            train(trainer, 4)
        assert_equal(trainer.state_dict(), after(4))
    assert seen == [3]


def test_a_second_interrupt_ends_at_once(once: Path, tmp_path: Path) -> None:
    with piper.launch(program(Twice)) as trainer:
        once.touch()
        trainer.save(tmp_path / "state")
        with pytest.raises(KeyboardInterrupt):
            train(trainer, 10)
        assert trainer.steps == 2
        for refused in (trainer.state_dict, lambda: trainer.save(tmp_path / "state")):
            with pytest.raises(PiperError, match="step 2 failed or was interrupted"):
                refused()
        trainer.load(tmp_path / "state")
        assert_equal(trainer.state_dict(), after(0))


def test_an_optimizer_that_raises(once: Path, tmp_path: Path) -> None:
    """Some tensors are already updated then: the state is invalid, and saving is refused."""
    with piper.launch(program(Failing)) as trainer:
        once.touch()
        train(trainer, 1)
        trainer.save(tmp_path / "state")
        train(trainer, 1)
        with pytest.raises(PiperError, match="OSError: no more"):
            train(trainer, 1)
        for refused in (lambda: trainer.save(tmp_path / "other"), lambda: train(trainer, 1)):
            with pytest.raises(PiperError, match=r"Resume from a checkpoint with trainer\.load"):
                refused()
        trainer.load(tmp_path / "state")
        train(trainer, 1)
        assert_equal(trainer.state_dict(), after(2))
