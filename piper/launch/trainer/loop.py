"""The loop of ``Trainer.fit`` and ``Trainer.iterate``: batches enter, results leave.

However it ends (by itself, ``break``, an error in the caller's code, Ctrl-C, SIGTERM), the state
after the last whole step is saved. Under torchrun a save needs all processes: with ``checkpoint=``
they agree, before and after each takes its batch, whether to continue. So a process that leaves
alone neither blocks the others nor loses their state.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from enum import Enum, IntEnum, auto
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from piper.base.errors import PiperError, warn
from piper.base.units import counted
from piper.capture.batch import Pad
from piper.launch.device.report import ProfileKind
from piper.launch.device.worker_group import WorkerGroup
from piper.launch.evaluation.held_out import HeldOut
from piper.launch.loggers.callback import Callback, Observations, told
from piper.launch.trainer.batch_tensors import arguments_of
from piper.launch.trainer.data_position import Position
from piper.launch.trainer.fit import Checkpoints, Stop
from piper.launch.trainer.fit_options import FitOptions
from piper.launch.trainer.fit_summary import Ended, FitSummary
from piper.launch.trainer.losses import Losses
from piper.launch.trainer.notices import Notice, Notices
from piper.launch.trainer.step_result import StepResult
from piper.launch.watch.interrupts import held_back
from piper.launch.watch.progress_bar import shown_progress
from piper.program.program import Program


class Steps(Protocol):
    """The part of a trainer that a loop uses."""

    notices: Notices
    program: Program

    @property
    def steps(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    def step_on(
        self, batch: Sequence[Any], *, rows: bool, pad: Pad | None, observe: ProfileKind | None
    ) -> StepResult: ...
    def refuse_rows(self, rows: int, pad: Pad | None) -> None: ...


class _Word(IntEnum):
    """The vote of each process between steps; the largest wins."""

    GO = 0
    ASKED = 1
    """SIGTERM asked the process to end."""
    OVER = 2
    """There are no more batches."""
    LEFT = 3
    """The caller stopped iterating, or an error ended the loop."""


class _At(Enum):
    """Where a process is in a round."""

    BETWEEN = auto()
    TAKING = auto()
    STEPPING = auto()


class Rounds:
    """Repeatedly takes a batch and trains on it."""

    def __init__(
        self,
        trainer: Steps,
        group: WorkerGroup,
        position: Position,
        options: FitOptions,
        saved: Checkpoints | None,
        held_out: HeldOut,
        callbacks: Sequence[Callback],
    ) -> None:
        self._trainer = trainer
        self._group = group
        self._position = position
        self._options = options
        self._saved = saved
        self._held_out = held_out
        self.folder = None if saved is None else saved.folder
        self._callbacks = callbacks
        self._observations = Observations(options.callbacks)
        self._steps = options.steps
        self._first = trainer.steps if saved is None else saved.first
        """The step before this call, which may have begun in an earlier process."""
        self._taken = 0
        """Steps of this call in this process."""
        self._at = _At.BETWEEN
        self._word = _Word.GO
        """The last word that all processes agreed on."""
        self._losses = Losses(trainer.notices)
        held_out.show = self._losses.evaluated
        if saved is not None and options.keep_best:
            held_out.improved = partial(saved.save_best, self._state)
        self._tokens = 0
        self._start = time.perf_counter()
        self._ended = Ended.EARLIER
        self._stop = Stop()
        self._before = 0
        """The trainer's step count before the last step began."""

    def summary(self) -> FitSummary:
        """The summary so far; waits for the last loss."""
        self._losses.finish()
        seconds = time.perf_counter() - self._start
        return FitSummary(
            steps=self._taken,
            last_step=self._trainer.steps,
            epochs=self._position.epochs,
            loss=self._losses.last,
            first_loss=self._losses.first,
            best_loss=self._losses.best,
            mean_loss=self._losses.mean,
            evaluations=tuple(self._held_out.losses),
            best_evaluation=self._held_out.best,
            seconds=seconds,
            tokens_per_second=self._tokens / max(seconds - self._held_out.seconds, 1e-9),
            resumed_from=None if self._saved is None else self._saved.resumed,
            ended=self._ended,
        )

    def run(self) -> Generator[StepResult, None, None]:
        """The results of all steps; each step runs when its result is requested."""
        self._start = time.perf_counter()
        if self._saved is not None and self._saved.done:
            return
        guarded = nullcontext() if self.folder is None else self._stop.on_sigterm()
        last = self._last
        showing = shown_progress(self._total, self._trainer.steps, self._options.progress)
        with showing as self._losses.display, guarded, told(self._callbacks, self._trainer):
            if self._saved is not None and self._saved.source is not None:
                self._losses.display.say(f"resumed from {_shown(self._saved.source)}")
            try:
                while self._agreed(_Word.ASKED if self._stop.asked else _Word.GO):
                    if last is not None and self._trainer.steps >= last:
                        break
                    if self._held_out.impatient or (result := self._round()) is None:
                        break
                    for callback in self._callbacks:
                        callback.on_step(self._trainer.steps, result)
                    self._held_out.after_step(self._trainer.steps)
                    yield result
                    if self._saved is not None:  # the caller has seen it: resuming leaves no gap
                        self._saved.after_step(self._state)
                self._losses.finish()
                self._ended = self._reason()
                if self._word in (_Word.GO, _Word.OVER) and self._trainer.steps > self._first:
                    self._at = _At.BETWEEN
                    self._held_out.at_end(self._trainer.steps)
            except BaseException as error:
                self._leave(error)
                raise
            asked = self._finish()
            self._tell()
            if asked:
                self._say_stopped()
                self._stop.end()

    def refuse_last(self) -> None:
        """Refuse a loader whose last batch will be refused, before the first step."""
        if self._options.rows or (self._saved is not None and self._saved.done):
            return
        steps = None if self._last is None else self._last - self._trainer.steps
        rows = self._position.last_rows(self._trainer.program.example.size, steps)
        if rows is not None:
            self._trainer.refuse_rows(rows, self._options.pad)

    @property
    def _last(self) -> int | None:
        """The step to end with."""
        return None if self._steps is None else self._first + self._steps

    @property
    def _total(self) -> int | None:
        """The last step, if it is known before."""
        ends = [self._last, None if (n := self._position.total) is None else self._first + n]
        return min((end for end in ends if end is not None), default=None)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds of this call."""
        return {**self._position.state(), **self._held_out.state()}

    def _reason(self) -> Ended:
        if self._word is _Word.GO and self._held_out.impatient:
            return Ended.PATIENCE
        epochs = self._options.epochs
        if self._word is _Word.OVER and epochs is not None and self._position.epochs >= epochs:
            return Ended.EPOCHS
        return _REASONS[self._word]

    def _round(self) -> StepResult | None:
        """Train on the next batch; None if there is none, if another process ends here, or if the
        evaluation after an epoch ends the run."""
        self._at = _At.TAKING
        batch = self._position.take()
        if batch is None and not self._position.over:
            self._at = _At.BETWEEN
            self._held_out.after_epoch(self._trainer.steps)
            if self._held_out.impatient:
                return None
            self._at = _At.TAKING
            batch = self._position.take()
        with held_back():  # from the agreement to continue until the end of the step
            if not self._agreed(_Word.OVER if batch is None else _Word.GO):
                return None
            assert batch is not None
            self._at = _At.STEPPING
            self._before = self._trainer.steps
            result = self._trainer.step_on(
                arguments_of(batch),
                rows=self._options.rows,
                pad=self._options.pad,
                observe=self._observations.of(self._before + 1),
            )
            self._position.trained()
            self._at = _At.BETWEEN
            self._taken += 1
            self._tokens += result.tokens
        self._losses.add(self._trainer.steps, result)
        return result

    def _agreed(self, word: _Word) -> bool:
        """Whether all processes continue; ``word`` is the vote of this one."""
        with held_back():
            self._word = word if self._saved is None else _Word(self._group.largest(word))
        return self._word is _Word.GO

    def _finish(self) -> bool:
        """Save the final state. Returns whether SIGTERM asked to end: this process, or any of them
        if they end together."""
        if self._saved is None:
            return False
        with held_back():
            if self._word is _Word.LEFT:
                if self._taken:
                    self._saved.finish(self._state)
                return self._stop.asked
            self._saved.finish(self._state)
            return bool(self._group.largest(int(self._stop.asked)))

    def _leave(self, error: BaseException) -> None:
        """Save the state after the last whole step when ``error`` ends the loop."""
        try:
            self._save_after(error)
        except Exception as failure:
            if isinstance(error, GeneratorExit):  # no other error would report it
                raise
            warn(f"the state after step {self._trainer.steps} is not saved: {failure}")
        else:
            if self._taken and not isinstance(error, GeneratorExit):
                self._say_stopped()

    def _save_after(self, error: BaseException) -> None:
        """Save the state after ``error``, if possible."""
        if self._saved is None or not self._can_save(error):
            return
        if self._at is _At.BETWEEN and self._taken:
            self._saved.after_step(self._state)
        if self._at is _At.STEPPING:
            self._word = _Word.LEFT
        elif self._word is _Word.GO:
            self._agreed(_Word.LEFT)
        self._finish()

    def _say_stopped(self) -> None:
        """Show the step after which the run ends too early, and its last checkpoint."""
        last = None if self._saved is None else self._saved.last
        if last is None:
            kept = "; nothing is saved"
        elif last[0] == self._trainer.steps:
            kept = f": saved {_shown(last[1])}"
        else:
            kept = f"; the last checkpoint is {_shown(last[1])}"
        self._losses.display.say(f"stopped after step {self._trainer.steps}{kept}")

    def _can_save(self, error: BaseException) -> bool:
        """Whether the state is that after a whole step, and all processes can take part."""
        alone = self._group.trainers == 1
        if self._group.damaged or (self._trainer.failed and not alone):
            return False
        if self._at is not _At.STEPPING:
            return True
        # no if others wait in that step, if a second Ctrl-C came, or if on_nan="stop" ended it: a
        # resumed run must see the same batch again
        return alone and isinstance(error, Exception) and self._trainer.steps == self._before

    def _tell(self) -> None:
        """Raise or warn if the loop ended in a way that the caller may not expect."""
        step = self._trainer.steps
        if self._word is _Word.LEFT:
            raise PiperError(
                f"another process has left the loop after step {step} (break, an error or Ctrl-C; "
                "look at what it wrote), so this one ends, too: all processes must leave it after "
                "the same step"
            )
        if self._word is _Word.OVER and self._position.has_batch:
            raise PiperError(
                f"the batches of another process ended after step {step}, and here there are more: "
                "all processes must be given the same number of batches"
            )
        if self._taken == 0 and self._saved is not None and self._saved.resumed is not None:
            warn(
                f"this call trains nothing: the run was resumed from step {step}, and there "
                f"{self._ended.value}; give more steps=, or call again for another pass"
            )
        elif self._ended is Ended.BATCHES and self._wanted is not None:
            self._trainer.notices.give(
                Notice.BATCHES,
                f"the batches ended after {self._wanted}, and cannot be begun again; {_CURE}",
            )
        elif self._ended is Ended.BATCHES and self._taken == 0:
            self._trainer.notices.give(
                Notice.BATCHES,
                "there is no batch to train on: there is none at all, or they are an iterator that "
                f"has been read; {_CURE}",
            )

    @property
    def _wanted(self) -> str | None:
        """How many of the steps or epochs that were asked for are done."""
        if self._steps is not None:
            done = self._trainer.steps - self._first
            return f"{done} of {counted(self._steps, 'step')}"
        epochs = self._options.epochs
        return None if epochs is None else f"{self._position.epochs} of {counted(epochs, 'epoch')}"


_CURE = (
    "a generator or another iterator is read once: give a list, a loader, or a function that "
    "yields batches, which are begun again"
)
_REASONS = {
    _Word.GO: Ended.STEPS,
    _Word.ASKED: Ended.ASKED,
    _Word.OVER: Ended.BATCHES,
    _Word.LEFT: Ended.BATCHES,  # not reported: the loop ends with an error
}


def _shown(path: Path) -> Path:
    """``path`` as it is shown, without the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


class Loop(Iterator[StepResult]):
    """The iterator that ``Trainer.iterate`` returns."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._results = rounds.run()  # without a reference to this object, whose deletion ends it
        self._begun = False

    def __next__(self) -> StepResult:
        self._begun = True
        return next(self._results)

    def refuse_last(self) -> None:
        """Refuse a loader whose last batch will be refused, before the first step."""
        self._begun = True
        self._rounds.refuse_last()

    def close(self) -> None:
        """End the loop: with ``checkpoint=``, the state after the last step is saved."""
        self._warn_unused()
        self._results.close()

    @property
    def folder(self) -> Path | None:
        """The folder of its checkpoints."""
        return self._rounds.folder

    def summary(self) -> FitSummary:
        """The summary so far."""
        return self._rounds.summary()

    def __del__(self) -> None:
        self._warn_unused()

    def _warn_unused(self) -> None:
        if not self._begun:
            self._begun = True
            warn(
                "trainer.iterate(...) was never read, so it has trained nothing: loop over "
                "it, or call trainer.fit(...), which trains"
            )
