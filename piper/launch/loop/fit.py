"""Checkpoints of a run at intervals, and resume from the last one.

    folder/step-00000050    after step 50, and so on
    folder/best             after the best evaluation, with keep_best

A run that is killed at any moment and restarted with ``resume`` continues from the last complete
checkpoint, with the same losses. SIGTERM lets the current step end, saves, and ends the run. A run
may be several calls of one trainer, such as one for each epoch: a checkpoint stores the number of
its call, and a restarted script skips the calls before that one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from piper.base.errors import PiperError, warn
from piper.base.paths import path_of
from piper.launch.loop.data_position import Position
from piper.launch.loop.fit_options import FitOptions
from piper.launch.state.state_calls import load_state, save_state
from piper.launch.trainer.session import Session
from piper.state.checkpoint import commit as folders

_NAME = "step-{:08}"
_BEST = "best"
StateOf = Callable[[], dict[str, Any]]


@dataclass(slots=True)
class SavedRun:
    """One run: all calls of one trainer that save to one folder."""

    calls: int
    """The number of calls so far."""
    resumed: int | None = None
    """The step that the run was resumed from."""
    path: Path | None = None
    """The checkpoint of that step."""
    call: int = 0
    """The number of the call in the loaded checkpoint: this call continues, earlier ones are
    done."""
    first: int = 0
    """The step before that call."""
    data: Any = None
    """The position of that call in its batches."""

    @staticmethod
    def of(data: Any, step: int, path: Path) -> SavedRun:
        """The run after a checkpoint of ``step`` at ``path`` with ``data``."""
        said = data if isinstance(data, dict) else {}
        call, first = said.get("call"), said.get("first")
        return SavedRun(
            0,
            resumed=step,
            path=path,
            call=call if isinstance(call, int) else 0,
            first=first if isinstance(first, int) else 0,
            data=data,
        )


def saved_in(folder: Path) -> dict[int, Path]:
    """The checkpoints of the run in ``folder``, by step."""
    return folders.numbered(folder / _NAME.format(0))


class Checkpoints:
    """The checkpoints of one call of ``fit`` or ``iterate``, in the folder of its run."""

    def __init__(self, session: Session, options: FitOptions) -> None:
        self._session = session
        given = options.checkpoint
        self.folder = None if given is None else path_of(given).absolute()
        """None if nothing is saved: the run continues from a checkpoint elsewhere."""
        self._options = options
        self._call = 0
        self._last: int | None = None
        """The step of the last checkpoint of this call."""
        self.first = 0
        """The step before this call began, in this process or before the resume."""
        self.resumed: int | None = None
        """The step that this call was resumed from."""
        self.source: Path | None = None
        """The checkpoint of that step."""
        self.done = False
        """Whether this call was done before the run was resumed."""

    def begin(self, runs: dict[Path | None, SavedRun], position: Position) -> Any:
        """Begin the next call of the run in this folder. The first call resumes from the last
        checkpoint, if there is one; later calls continue. Returns what was saved of this call."""
        if self.folder not in runs:
            runs[self.folder] = self._begun()
        run = runs[self.folder]
        self._call = run.calls
        run.calls += 1
        self.first = self._session.steps
        if run.resumed is not None and self._call <= run.call:
            self.resumed, self.source = run.resumed, run.path
            self.done = self._call < run.call
            if not self.done:
                self.first, self._last = run.first, run.resumed
                position.go_to(run.data, run.resumed)
                return run.data
        return None

    def _begun(self) -> SavedRun:
        """The run, resumed from its last checkpoint, or from one elsewhere if there is none."""
        resume, folder = self._options.resume, self.folder
        known = {} if folder is None else self._session.devices.once(self._prepare)
        if known and not resume:
            raise PiperError(
                f"{folder} has the checkpoints of a run that reached step {max(known)}: set "
                "resume=True (piper train: --resume) to continue it, or use another folder"
            )
        if known or isinstance(resume, bool):
            return self._last_of(known) or SavedRun(0)
        elsewhere = path_of(resume)
        run = self._last_of(self._session.devices.once(partial(saved_in, elsewhere)))
        if run is None:
            run = SavedRun.of(self._load(elsewhere), self._session.steps, elsewhere)
        run.call = 0  # calls count by folder: this is the first in another one
        return run

    def _last_of(self, known: Mapping[int, Path]) -> SavedRun | None:
        """The run after its last checkpoint; one that cannot be loaded is skipped."""
        refused: dict[int, PiperError] = {}
        for step in sorted(known, reverse=True):
            try:
                data = self._load(known[step])
            except PiperError as error:
                refused[step] = error
                continue
            for later, why in refused.items():
                warn(f"the run does not resume from step {later}: {why}")
            return SavedRun.of(data, step, known[step])
        if refused:
            raise next(iter(refused.values()))
        return None

    def _load(self, path: Path) -> Any:
        return load_state(self._session, path, new_settings=self._options.new_settings)

    def _prepare(self) -> dict[int, Path]:
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return saved_in(self.folder)
        except OSError as error:
            raise PiperError(f"{self.folder} cannot be used for checkpoints: {error}") from error

    @property
    def resumes(self) -> bool:
        """Whether the run continues by itself if it is started again."""
        return self._options.resume is not False

    @property
    def last(self) -> tuple[int, Path] | None:
        """The step of the last checkpoint of this call, and its path."""
        if self.folder is None or self._last is None:
            return None
        return self._last, self.folder / _NAME.format(self._last)

    def after_step(self, state: StateOf) -> None:
        """Save if a checkpoint is due; ``state`` gives the state of the call."""
        every = self._options.every
        if every is not None and self._session.steps % every == 0:
            self._save(state, background=self._options.background)

    def finish(self, state: StateOf) -> None:
        """Save, unless this step is saved already; everything is written when this returns."""
        self._save(state, background=False)
        self._session.saving.settle()

    def save_best(self, state: StateOf) -> None:
        """Save, in place of the best checkpoint before."""
        if self.folder is not None:
            self._save_at(self.folder / _BEST, state, None, background=False)

    def _save(self, state: StateOf, *, background: bool) -> None:
        step = self._session.steps
        if self.folder is None or self._last == step:
            return
        self._last = step  # before saving: after a late Ctrl-C, other ranks would not save again
        path = self.folder / _NAME.format(step)
        self._save_at(path, state, self._options.keep, background=background)

    def _save_at(self, path: Path, state: StateOf, keep: int | None, *, background: bool) -> None:
        """Save, with the state of the call as rank 0 has it."""
        own = self._session.devices.once(state)
        data = {**own, "call": self._call, "first": self.first}
        save_state(self._session, path, data, keep, background=background)


class Stop:
    """Whether SIGTERM asked the process to end."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Inside, SIGTERM only sets ``asked``. This works in the main thread alone."""
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
        """Do what SIGTERM would have done: call the user's handler, or end the process."""
        usual = self._usual if self.asked else signal.SIG_DFL
        if callable(usual):
            usual(signal.SIGTERM, None)
        elif usual is not signal.SIG_IGN:
            raise SystemExit(128 + signal.SIGTERM)
