"""Background saves: training continues while the state is copied to the host and written.

Every device copies its part of the state during the next step, each bucket before its update, and a
thread of its process writes the copy. When all have written, the next call of the trainer commits
the checkpoint. A failed save leaves the previous checkpoint, and that call reports it.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace

from piper.base.errors import PiperError, warn
from piper.launch.device.device import WorkerDevice
from piper.launch.device.worker_group import Each, WorkerGroup
from piper.launch.state.saving import Save


class BackgroundSave:
    """The checkpoint that a trainer has begun to write but not yet finished, if any."""

    def __init__(self) -> None:
        self._begun: tuple[WorkerGroup, Save] | None = None

    def begin(self, group: WorkerGroup, one: Save) -> None:
        """Like ``saving.save``, but returns before the checkpoint is written."""
        one = replace(one, rest=dict(one.rest), data=copy.deepcopy(one.data))
        plans = Each(lambda device: one.program.saving.plan_of(device))
        group.call(WorkerDevice.begin_part, one.staged.folder, plans)
        self._begun = group, one

    def settle(self, *, wait: bool = True) -> None:
        """Commit the checkpoint, if it is written or with ``wait``; raises if the save failed. All
        processes with a trainer must call this."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        group, one = begun
        written = all(group.call(WorkerDevice.part_is_written))
        if not wait and group.largest(int(not written)):
            self._begun = begun
        else:
            one.finish(group, group.call(WorkerDevice.written_part))

    def settle_late(self, error: BaseException | None = None) -> None:
        """Commit the checkpoint when no later call will: after ``error``, or when the trainer was
        not closed and is gone (garbage-collected, or at interpreter exit)."""
        if self._begun is None:
            return
        group, one = self._begun
        error = error or getattr(sys, "last_value", None)  # the error that ended the interpreter
        try:
            if error is not None and group.trainers > 1:
                raise PiperError(
                    "an error has ended this process, and a checkpoint needs all of them"
                )
            self.settle()
        except Exception as failure:  # noqa: BLE001 - any failure becomes a warning
            self._begun = None
            target = one.staged.target
            warn(f"the save to {target} in the background is not finished: {failure}")
