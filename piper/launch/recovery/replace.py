"""``recover="replace"``: new processes take the places of the lost ones, and the others stay."""

from __future__ import annotations

from piper.launch.messages.calling_group import CallingGroup
from piper.launch.recovery.policy import Answer
from piper.launch.running import start
from piper.program.program import Program


class Replace:
    """Replaces lost workers."""

    def answer(self, group: CallingGroup, program: Program, running: Program) -> Answer:
        start(group, program)
        return Answer(program)
