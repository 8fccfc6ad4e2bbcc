"""A run that survives its process: checkpoints at intervals, and the way back to the last one.

    folder/step-00000050    after step 50, and so on

A run that is killed at any moment and started again with ``resume`` continues from the last whole
checkpoint, with the same losses. SIGTERM lets the step end, saves, and ends the run.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from piper.checkpoint import folder as folders
from piper.errors import PiperError, warn
from piper.launch.positions import Position
from piper.launch.worker_group import WorkerGroup
from piper.paths import path_of

_NAME = "step-{:08}"


class Saver(Protocol):
    """What a run needs of a trainer."""

    steps: int

    def save_at(self, path: Path, data: Any, keep: int | None, *, background: bool) -> None: ...

    def settle_save(self) -> None: ...

    def load_at(self, path: Path) -> Any: ...


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(
        self,
        trainer: Saver,
        folder: str | Path,
        every: int | None,
        keep: int | None,
        background: bool,
    ) -> None:
        for name, number in (("every", every), ("keep", keep)):
            whole = isinstance(number, int) and not isinstance(number, bool)
            if number is not None and not (whole and number >= 1):
                raise PiperError(f"{name}={number!r} must be a whole number from 1 on, or None")
        self._trainer = trainer
        self._folder = path_of(folder)
        self._every = every
        self._keep = keep
        self._background = background
        self._last: int | None = None
        """The step of the last checkpoint."""

    def begin(self, position: Position, *, resume: bool, group: WorkerGroup) -> None:
        """Go on from the last checkpoint, if there is one; a damaged one is passed over."""
        known = group.once(self._prepare)
        if known and not resume:
            raise PiperError(
                f"{self._folder} has the checkpoints of a run that got to step {max(known)}: say "
                "resume=True to resume from there, or use another folder"
            )
        refused: PiperError | None = None
        for step in sorted(known, reverse=True):
            try:
                data = self._trainer.load_at(known[step])
            except PiperError as error:
                warn(f"the run does not resume from step {step}: {error}")
                refused = refused or error
                continue
            position.go_to(data, step)
            self._last = step
            return
        if refused is not None:
            raise refused

    def _prepare(self) -> dict[int, Path]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return folders.numbered(self._folder / _NAME.format(0))
        except OSError as error:
            raise PiperError(f"{self._folder} cannot be used for checkpoints: {error}") from error

    def after_step(self, position: Position) -> None:
        """Save if it is time to."""
        if self._every is not None and self._trainer.steps % self._every == 0:
            self._save(position, background=self._background)

    def finish(self, position: Position) -> None:
        """Save, if that has not happened after this step; all is written when this returns."""
        self._save(position, background=False)
        self._trainer.settle_save()

    def _save(self, position: Position, *, background: bool) -> None:
        step = self._trainer.steps
        if self._last != step:
            path = self._folder / _NAME.format(step)
            self._trainer.save_at(path, position.state(), self._keep, background=background)
            self._last = step


class Stop:
    """Whether the process was asked to end."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Inside, SIGTERM is noted; only the main thread can do that."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.asked = True

        self._usual = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, self._usual)

    def end(self) -> None:
        """Do what SIGTERM would have done: end the process, or what the user's handler does."""
        usual = self._usual if self.asked else signal.SIG_DFL
        if callable(usual):
            usual(signal.SIGTERM, None)
        elif usual is not signal.SIG_IGN:
            raise SystemExit(128 + signal.SIGTERM)
