"""What answers a fault: each policy is a small file of its own, chosen by ``recover=``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from piper.launch.messages.calling_group import CallingGroup
from piper.program.program import Program


@dataclass(frozen=True, slots=True)
class Answer:
    """How training continues after a fault."""

    program: Program
    """What the devices run now: the program, or another that trains the same."""
    keeps_state: bool = False
    """Whether they have the state before the failed call. Otherwise they read the last copy, and
    the calls since then are made again."""
    without: tuple[int, ...] = ()
    """The devices of the program that they do without."""


class Policy(Protocol):
    """An answer to faults of workers."""

    def answer(
        self, group: CallingGroup, program: Program, running: Program, *, intact: bool
    ) -> Answer:
        """After a fault, load ``program``, or another that trains the same, on the devices of
        ``group``. Those whose processes cannot take another call have none. Until then they ran
        ``running``. ``intact`` says that what they have kept is the state before the failed call:
        nothing else was loaded since."""
        ...
