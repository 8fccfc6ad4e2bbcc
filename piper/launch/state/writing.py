"""A thread that writes a device's part of a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable

from piper.launch.device.report import Refusal
from piper.state.checkpoint.index import Part


class Writing:
    """A part that is being written."""

    def __init__(self, write: Callable[[], Part | Refusal]) -> None:
        """``write`` waits for a copy of the state, writes it, and then releases it."""
        self._write: Callable[[], Part | Refusal] | None = write
        self._part: Part | Refusal | None = None
        self._thread = threading.Thread(target=self._run, name="piper save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        write, self._write = self._write, None
        assert write is not None
        try:
            self._part = write()
        except Exception as error:  # noqa: BLE001 - any error is reported to the caller
            self._part = Refusal(str(error) or type(error).__name__)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Part | Refusal:
        """The written part; waits for the thread."""
        self._thread.join()
        assert self._part is not None
        return self._part
