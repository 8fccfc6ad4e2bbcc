"""How a loop ends: by itself, ``break``, an error in the caller's code, Ctrl-C or SIGTERM.

However it ends, the state after the last whole step is saved. Under torchrun a save needs all
processes: with ``checkpoint=`` they vote, before and after each takes its batch, whether to
continue. So a process that leaves alone neither blocks the others nor loses their state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from piper.base.errors import PiperError, warn
from piper.launch.loop.fit import Checkpoints, StateOf, Stop
from piper.launch.trainer.session import Session
from piper.launch.watch.interrupts import held_back
from piper.launch.watch.progress_bar import Display


class Vote(IntEnum):
    """The vote of each process between steps; the largest wins."""

    GO = 0
    ASKED = 1
    """SIGTERM asked the process to end."""
    OVER = 2
    """There are no more batches."""
    LEFT = 3
    """The caller stopped iterating, or an error ended the loop."""


class Ending:
    """Follows a loop from step to step, and ends it."""

    def __init__(self, session: Session, saved: Checkpoints | None, state: StateOf) -> None:
        """``state`` gives the state of the loop, for a checkpoint."""
        self._session = session
        self._saved = saved
        self._state = state
        self.stop = Stop()
        self.vote = Vote.GO
        """The last vote that all processes agreed on."""
        self.taken = 0
        """Steps of this loop in this process."""
        self._is_stepping = False
        self._before = 0
        """The number of steps before the last one began."""

    def continues(self) -> bool:
        """Whether all processes continue; this one does unless SIGTERM asked it to end."""
        return self.agreed(Vote.ASKED if self.stop.asked else Vote.GO)

    def agreed(self, vote: Vote) -> bool:
        """Whether all processes continue; ``vote`` is that of this one."""
        with held_back():
            saved = self._saved
            self.vote = vote if saved is None else Vote(self._session.devices.largest(vote))
        return self.vote is Vote.GO

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, this process trains."""
        self._before = self._session.steps
        self._is_stepping = True  # also after an error inside
        yield
        self._is_stepping = False
        self.taken += 1

    def finish(self) -> bool:
        """Save the final state. Returns whether SIGTERM asked to end: this process, or any of them
        if they end together."""
        if self._saved is None:
            return False
        with held_back():
            if self.vote is Vote.LEFT:
                if self.taken:
                    self._saved.finish(self._state)
                return self.stop.asked
            self._saved.finish(self._state)
            return bool(self._session.devices.largest(int(self.stop.asked)))

    def refuse_other_ends(self, *, has_batch: bool) -> None:
        """Raise if another process has ended the loop; ``has_batch`` says whether this one could
        continue."""
        step = self._session.steps
        if self.vote is Vote.LEFT:
            raise PiperError(
                f"another process has left the loop after step {step} (break, an error or Ctrl-C; "
                "look at what it wrote), so this one ends, too: all processes must leave it after "
                "the same step"
            )
        if self.vote is Vote.OVER and has_batch:
            raise PiperError(
                f"the batches of another process ended after step {step}, and here there are more: "
                "all processes must be given the same number of batches"
            )

    def leave(self, error: BaseException, display: Display) -> None:
        """Save the state after the last whole step when ``error`` ends the loop, and say so."""
        try:
            self._save_after(error)
        except Exception as failure:
            if isinstance(error, GeneratorExit):  # no other error would report it
                raise
            warn(f"the state after step {self._session.steps} is not saved: {failure}")
        else:
            if self.taken and not isinstance(error, GeneratorExit):
                self.say_stopped(display)

    def say_stopped(self, display: Display) -> None:
        """Show the step after which the run ends too early, and its last checkpoint."""
        last = None if self._saved is None else self._saved.last
        if last is None:
            kept = "; nothing is saved"
        elif last[0] == self._session.steps:
            kept = f": saved {shown(last[1])}"
        else:
            kept = f"; the last checkpoint is {shown(last[1])}"
        if self._saved is not None and last is not None:
            how = "" if self._saved.resumes else " with resume=True (piper train: --resume)"
            kept += f"; to continue, run again{how}"
        display.say(f"stopped after step {self._session.steps}{kept}")

    def shortened(self, error: BaseException) -> BaseException:
        """``error`` without its traceback if it is a Ctrl-C that waited for the end of a step: the
        place says nothing to the caller."""
        told = isinstance(error, KeyboardInterrupt) and not self._is_stepping
        return error.with_traceback(None) if told else error

    def _save_after(self, error: BaseException) -> None:
        """Save the state after ``error``, if possible."""
        if self._saved is None or not self._can_save(error):
            return
        if self._is_stepping:
            self.vote = Vote.LEFT
        else:
            if self.taken:  # the other processes save if it is due, and only then vote
                self._saved.after_step(self._state)
            if self.vote is Vote.GO:
                self.agreed(Vote.LEFT)
        self.finish()

    def _can_save(self, error: BaseException) -> bool:
        """Whether the state is that after a whole step, and all processes can take part."""
        session = self._session
        alone = session.devices.trainers == 1
        if session.devices.damaged or (session.failed and not alone):
            return False
        if not self._is_stepping:
            return True
        # no if others wait in that step, if a second Ctrl-C came, or if on_nan="stop" ended it: a
        # resumed run must see the same batch again
        return alone and isinstance(error, Exception) and session.steps == self._before


def shown(path: Path) -> Path:
    """``path`` as it is shown, without the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
