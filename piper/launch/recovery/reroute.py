"""``recover="reroute"``: the rows of a lost data-parallel replica go to the others.

The program without one replica is compiled when training begins. Any replica may be lost: workers
of the last one take the places of the lost one's devices. The processes stay, and so does the state
that they hold, if the failed call has changed it nowhere. If that is not all of the state (with
ZeRO, the lost shards are missing), they read its last copy.
"""

from __future__ import annotations

from piper.base.errors import DirectiveError, PiperError
from piper.launch.messages.calling_group import CallingGroup
from piper.launch.recovery.kept_state import kept_by, start_with
from piper.launch.recovery.policy import Answer
from piper.launch.recovery.replace import Replace
from piper.program.program import Program
from piper.program.rerouted import ReroutedProgram, rerouted


class Reroute:
    """Goes on without a lost replica; replaces workers where that is not possible."""

    def __init__(self, program: Program) -> None:
        """Refuses a ``program`` that cannot lose a replica."""
        try:
            self._known = {id(program): (program, rerouted(program))}
        except DirectiveError as error:
            raise PiperError(
                f"recover='reroute': {error}. Use recover='replace', which needs no other replica"
            ) from error

    def answer(
        self, group: CallingGroup, program: Program, running: Program, *, intact: bool
    ) -> Answer:
        less = self._less(program) if program is running else None  # or a replica is lost already
        here = set(group.devices)
        hit = [] if less is None else [r for r in less.replicas if not here.issuperset(r)]
        if less is None or len(hit) != 1:
            return Replace().answer(group, program, running, intact=intact)
        left, last = here.difference(hit[0]), less.replicas[-1]
        group.seat(left, program.device)
        index = kept_by(group, program) if intact else None
        if left.issuperset(last):
            group.rename(dict(zip(last, hit[0], strict=True)))
        start_with(group, less.program, index)
        return Answer(less.program, keeps_state=index is not None, without=hit[0])

    def _less(self, program: Program) -> ReroutedProgram | None:
        """``program`` without a replica; None if it cannot lose one."""
        if id(program) not in self._known:
            try:
                self._known[id(program)] = program, rerouted(program)
            except DirectiveError:
                return None
        return self._known[id(program)][1]
