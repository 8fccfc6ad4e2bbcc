"""The state before a failed call, which the devices that are left have in memory.

A device has it if the call failed there, too, and had not begun to change it. Together the devices
may have all of it: the lost ones had copies, or none was lost.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from piper.base.errors import PiperError
from piper.launch.device.device import WorkerDevice
from piper.launch.device.device_programs import device_programs
from piper.launch.device.worker_group import Each
from piper.launch.messages.calling_group import CallingGroup
from piper.launch.running import start
from piper.launch.state.saving import index_of
from piper.program.program import Program
from piper.state.checkpoint.index import Index, Part


def kept_by(group: CallingGroup, program: Program) -> Index | None:
    """The index of the state before the failed call; None if the devices do not have all of it."""
    here = group.devices
    for bucket in program.buckets:
        for copies in bucket.replica_groups if bucket.level else bucket.groups:
            if not set(copies).intersection(here):
                return None
    answers: Sequence[Part | None] = group.call(WorkerDevice.give_kept)
    parts = [part for part in answers if part is not None]
    if not parts or len(parts) < len(answers) or len({part.steps for part in parts}) > 1:
        return None
    return index_of(program, parts, None)


def start_with(group: CallingGroup, program: Program, index: Index | None) -> None:
    """Load ``program`` on its devices, with the state of ``index`` or else the initial weights."""
    if index is None:
        start(group, program)
        return
    group.seat(program.devices, program.device)
    given = Each(device_programs(program), own=program.training)
    prepared = group.call(WorkerDevice.prepare, given, index)
    if whys := [why for one in prepared for why in one.refused]:
        raise PiperError(f"the state cannot be taken over: {whys[0]}")
    wants = {one.device: one.requests for one in prepared}
    group.call(WorkerDevice.finish, uuid.uuid4().hex, wants)
    group.call(WorkerDevice.take)
