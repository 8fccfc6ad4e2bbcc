"""A thread that writes a device's part of a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from piper.launch.device.report import Refusal
from piper.state.checkpoint.index import Part


def written_by(write: Callable[[], Part | Refusal]) -> Future[Part | Refusal]:
    """The part that ``write`` will have written, in a thread that does not outlive the process.
    ``write`` waits for a copy of the state, writes it, and then releases it."""
    written: Future[Part | Refusal] = Future()

    def run() -> None:
        try:
            part = write()
        except Exception as error:  # noqa: BLE001 - any error is reported to the caller
            part = Refusal(str(error) or type(error).__name__)
        written.set_result(part)

    threading.Thread(target=run, name="piper save", daemon=True).start()
    return written
