"""A copy of the state in the folder of the workers, from which replaced workers continue.

It has the format of a checkpoint, without its guarantees: it need not survive the machine.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from piper.base.errors import PiperError, WorkerError
from piper.launch.device.device import WorkerDevice
from piper.launch.messages.calling_group import CallingGroup
from piper.launch.state.saving import accepted, index_of
from piper.program.program import Program
from piper.state.checkpoint.index import Index

_SHARE = 20
"""Copies take at most one part in so many of the time."""


class Mirror:
    """The last copy of the state of a worker group."""

    def __init__(self, group: CallingGroup, seconds: float) -> None:
        """Copies go into the folder of ``group``, one every ``seconds``."""
        self._group = group
        self._seconds = seconds
        self._copies = 0
        self._due = 0.0
        self._last: tuple[Path, Index] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no copy."""
        return self._last is None

    @property
    def is_due(self) -> bool:
        """Whether the state should be copied before it changes."""
        return self.is_empty or time.monotonic() >= self._due

    def expire(self) -> None:
        """The next copy is due."""
        self._due = 0.0

    def copy(self, program: Program) -> str | None:
        """Copy the state of ``program``; the earlier copy is removed. Returns why it failed: then
        the earlier copy stays."""
        start = time.monotonic()
        folder = self._group.folder / f"state-{self._copies}"
        self._copies += 1
        try:
            folder.mkdir()
            parts = accepted(self._group.call(WorkerDevice.write_copy, folder))
            index = index_of(program, parts, None)
        except (OSError, PiperError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            self._set_due(start)
            if isinstance(error, WorkerError):
                raise
            return str(error)
        if self._last is not None:
            shutil.rmtree(self._last[0], ignore_errors=True)
        self._last = folder, index
        self._set_due(start)
        return None

    def restore(self) -> None:
        """Give the devices the state of the last copy."""
        assert self._last is not None
        self._group.call(WorkerDevice.read_part, *self._last)

    def _set_due(self, start: float) -> None:
        now = time.monotonic()
        self._due = now + max(self._seconds, _SHARE * (now - start))
