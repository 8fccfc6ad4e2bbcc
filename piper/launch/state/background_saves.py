"""Background saves: training continues while the state is copied to the host and written.

Every device copies its part of the state during the next step, each bucket before its update, and a
thread of its process writes the copy. When all have written, the next call of the trainer commits
the checkpoint. A failed save leaves the previous checkpoint, and that call reports it.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

from piper.base.errors import PiperError, warn
from piper.launch.device.device import WorkerDevice
from piper.launch.device.worker_group import Each, WorkerGroup
from piper.launch.state.saving import Save


class BackgroundSave:
    """A checkpoint that is being written."""

    def __init__(self, group: WorkerGroup, one: Save) -> None:
        """Like ``saving.save``, but returns before the checkpoint is written."""
        self._group = group
        self._save = replace(one, rest=dict(one.rest), data=copy.deepcopy(one.data))
        plans = Each(lambda device: one.program.saving.plan_of(device))
        group.call(WorkerDevice.begin_part, one.staged.folder, plans)

    @property
    def target(self) -> Path:
        return self._save.staged.target

    @property
    def takes_others(self) -> bool:
        """Whether the save needs other processes with a trainer."""
        return self._group.trainers > 1

    def settled(self, *, wait: bool) -> bool:
        """Whether the checkpoint is written and committed; raises if the save failed. All processes
        with a trainer must call this."""
        group = self._group
        written = all(group.call(WorkerDevice.part_is_written))
        if not wait and group.largest(int(not written)):
            return False
        self._save.finish(group, group.call(WorkerDevice.written_part))
        return True


class PendingSave:
    """The background save that a trainer has begun but not yet finished, if any."""

    def __init__(self) -> None:
        self._save: BackgroundSave | None = None

    def begin(self, save: BackgroundSave) -> None:
        self._save = save

    def settle(self, *, wait: bool = True) -> None:
        """Finish the save, if it is written or with ``wait``; raises if it failed."""
        save, self._save = self._save, None
        if save is not None and not save.settled(wait=wait):
            self._save = save

    def settle_late(self, error: BaseException | None = None) -> None:
        """Finish the save when no later call will: after ``error``, or when the trainer was not
        closed and is gone (garbage-collected, or at interpreter exit)."""
        save = self._save
        if save is None:
            return
        error = error or getattr(sys, "last_value", None)  # the error that ended the interpreter
        try:
            if error is not None and save.takes_others:
                raise PiperError(
                    "an error has ended this process, and a checkpoint needs all of them"
                )
            self.settle()
        except Exception as failure:  # noqa: BLE001 - any failure becomes a warning
            self._save = None
            warn(f"the save to {save.target} in the background is not finished: {failure}")
