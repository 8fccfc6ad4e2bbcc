"""``recover="replace"``: new processes take the places of the lost ones, and the others stay."""

from __future__ import annotations

from piper.launch.messages.calling_group import CallingGroup
from piper.launch.recovery.kept_state import kept_by, start_with
from piper.launch.recovery.policy import Answer
from piper.program.program import Program


class Replace:
    """Replaces lost workers."""

    def answer(
        self, group: CallingGroup, program: Program, running: Program, *, intact: bool
    ) -> Answer:
        index = kept_by(group, running) if intact else None
        start_with(group, program, index)
        return Answer(program, keeps_state=index is not None)
