"""``recover="reroute"``: the rows of a lost data-parallel replica go to the others.

The program without one replica is compiled when training begins. Any replica may be lost: workers
of the last one take the places of the lost one's devices. The processes stay, and so does the state
that they hold, if the failed call has changed it nowhere. If that is not all of the state (with
ZeRO, the lost shards are missing), they read its last copy.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from piper.base.errors import DirectiveError, PiperError
from piper.launch.device.device import WorkerDevice
from piper.launch.device.device_programs import device_programs
from piper.launch.device.worker_group import Each
from piper.launch.messages.calling_group import CallingGroup
from piper.launch.recovery.policy import Answer
from piper.launch.recovery.replace import Replace
from piper.launch.running import start
from piper.launch.state.saving import index_of
from piper.program.program import Program
from piper.program.rerouted import ReroutedProgram, rerouted
from piper.state.checkpoint.index import Index, Part


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

    def answer(self, group: CallingGroup, program: Program, running: Program) -> Answer:
        if program is not running:  # a replica is lost already
            return Replace().answer(group, program, running)
        less = self._less(program)
        here = set(group.devices)
        hit = [] if less is None else [r for r in less.replicas if not here.issuperset(r)]
        if less is None or len(hit) != 1:
            return Replace().answer(group, program, running)
        left, last = here.difference(hit[0]), less.replicas[-1]
        group.seat(left, program.device)
        index = _kept(group, program)
        if left.issuperset(last):
            group.rename(dict(zip(last, hit[0], strict=True)))
        if index is None:
            start(group, less.program)
            return Answer(less.program, without=hit[0])
        _resume(group, less.program, index)
        return Answer(less.program, keeps_state=True, without=hit[0])

    def _less(self, program: Program) -> ReroutedProgram | None:
        """``program`` without a replica; None if it cannot lose one."""
        if id(program) not in self._known:
            try:
                self._known[id(program)] = program, rerouted(program)
            except DirectiveError:
                return None
        return self._known[id(program)][1]


def _kept(group: CallingGroup, program: Program) -> Index | None:
    """The index of the state before the failed call; None if the devices do not have all of it."""
    here = group.devices
    for bucket in program.buckets:
        for copies in bucket.replica_groups if bucket.level else bucket.groups:
            if not set(copies).intersection(here):
                return None
    answers: Sequence[Part | None] = group.call(WorkerDevice.give_kept)
    parts = [part for part in answers if part is not None]
    if len(parts) < len(answers) or len({part.steps for part in parts}) > 1:
        return None
    return index_of(program, parts, None)


def _resume(group: CallingGroup, program: Program, index: Index) -> None:
    """Continue with ``program`` from the state that the devices have kept."""
    group.seat(program.devices, program.device)
    given = Each(device_programs(program), own=program.training)
    prepared = group.call(WorkerDevice.prepare, given, index)
    if whys := [why for one in prepared for why in one.refused]:
        raise PiperError(f"the state cannot be taken over: {whys[0]}")
    wants = {one.device: one.requests for one in prepared}
    group.call(WorkerDevice.finish, uuid.uuid4().hex, wants)
    group.call(WorkerDevice.take)
