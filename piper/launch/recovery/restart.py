"""``recover="restart"``: all devices get new processes, also those that a fault left alone."""

from __future__ import annotations

from piper.launch.messages.calling_group import CallingGroup
from piper.launch.recovery.policy import Answer
from piper.launch.running import start
from piper.program.program import Program


class Restart:
    """Starts all workers again."""

    def answer(
        self, group: CallingGroup, program: Program, running: Program, *, intact: bool
    ) -> Answer:
        group.seat((), program.device)
        start(group, program)
        return Answer(program)
