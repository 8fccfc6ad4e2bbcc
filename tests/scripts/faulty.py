"""Things that fail on request: an operation, optimizers, ``init``.

Workers import this module by the names in programs and callables; it needs only torch.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Act(IntEnum):
    """What the operation does if this number is among the tokens."""

    RAISE = 0
    KILL = 1
    STOP = 2
    EXIT = 3
    INTERRUPT_PARENT = 4
    KILL_PARENT = 5


class ToldToFailError(Exception):
    """A user's own error."""


@torch.library.custom_op("piper_tests::act", mutates_args=())
def act(tokens: Tensor) -> Tensor:
    """The tokens unchanged, unless one of them is an ``Act``."""
    found = tokens[tokens < len(Act)]
    if found.numel():
        _do(Act(int(found[0])))
    return tokens.clone()


@act.register_fake
def _(tokens: Tensor) -> Tensor:
    return torch.empty_like(tokens)


def _do(what: Act) -> None:
    match what:
        case Act.RAISE:
            _hold_up(_caller())
            raise ToldToFailError("told to fail")
        case Act.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Act.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Act.EXIT:
            os._exit(0)
        case Act.INTERRUPT_PARENT:
            os.kill(_caller(), signal.SIGINT)
        case Act.KILL_PARENT:
            os.kill(_caller(), signal.SIGKILL)


def _caller() -> int:
    """The process that has the trainer: the parent of the one that forked this one."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def _hold_up(process: int) -> None:
    """Stop ``process`` for two seconds. When it continues, other workers have failed too, because
    this one is gone: it must find the one to blame."""
    later = f"sleep 2; kill -CONT {process}"
    subprocess.Popen(["sh", "-c", later], start_new_session=True, stdin=subprocess.DEVNULL)
    os.kill(process, signal.SIGSTOP)


class Worn(torch.optim.SGD):
    """Fails in its third step, except in the process ``tried_in``, where ``compile`` tries it."""

    def __init__(self, parameters: Sequence[nn.Parameter], tried_in: int | None = None) -> None:
        super().__init__(parameters, lr=0.01)
        self.left = 2 if os.getpid() != tried_in else math.inf

    def step(self, closure: Any = None) -> Any:
        if not self.left:
            raise ToldToFailError("worn out")
        self.left -= 1
        return super().step(closure)


class Unreadable:
    """An optimizer that can be pickled but not unpickled: the first reader fails, others hang."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self.folder / "first",)


def _read(first: Path) -> Any:
    try:
        first.mkdir()
    except FileExistsError:
        time.sleep(600)
    raise ToldToFailError("told to fail")


def bad_init(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fails like a read from a truncated file."""
    raise EOFError(f"no values for {name}")
