"""What answers a fault: each policy is a small file of its own, chosen by ``recover=``."""

from __future__ import annotations

from typing import Protocol

from piper.launch.messages.calling_group import CallingGroup
from piper.program.program import Program


class Policy(Protocol):
    """An answer to a fault of workers. The devices have their state from the last copy after it,
    and then the calls since are made again."""

    def load(self, group: CallingGroup, program: Program) -> None:
        """After a fault, load ``program`` on the devices of ``group``. Those whose processes cannot
        take another call have none."""
        ...
