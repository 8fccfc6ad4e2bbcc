"""The loop of ``Trainer.fit`` and ``Trainer.iterate``: batches enter, results leave."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from piper.base.errors import PiperError, warn
from piper.base.units import counted
from piper.launch.evaluation.held_out import HeldOut
from piper.launch.loggers.callback import Callback, Observations, told
from piper.launch.loop.data_position import READ_ONCE, Position
from piper.launch.loop.ending import Ending, Vote, shown
from piper.launch.loop.fit import Checkpoints
from piper.launch.loop.fit_options import FitOptions
from piper.launch.loop.fit_summary import Ended, FitSummary
from piper.launch.loop.losses import Losses
from piper.launch.trainer import training_calls
from piper.launch.trainer.batch_tensors import arguments_of
from piper.launch.trainer.notices import Notice
from piper.launch.trainer.session import Session
from piper.launch.trainer.step_result import StepResult
from piper.launch.watch.interrupts import held_back
from piper.launch.watch.progress_bar import shown_progress


class Rounds:
    """Repeatedly takes a batch and trains on it."""

    def __init__(
        self,
        trainer: Any,
        session: Session,
        position: Position,
        options: FitOptions,
        saved: Checkpoints | None,
        held_out: HeldOut,
        callbacks: Sequence[Callback],
    ) -> None:
        """``callbacks`` are given the ``trainer`` of ``session``."""
        self._trainer = trainer
        self._session = session
        self._position = position
        self._options = options
        self._saved = saved
        self._held_out = held_out
        self.folder = None if saved is None else saved.folder
        self._callbacks = callbacks
        self._observations = Observations(options.callbacks)
        self._steps = options.steps
        self._first = session.steps if saved is None else saved.first
        """The step before this call, which may have begun in an earlier process."""
        # without self: a cycle of references would keep a trainer that nobody has any more
        self._state = lambda: {**position.state(), **held_out.state()}
        """What a checkpoint holds of this call."""
        self._ending = Ending(session, saved, self._state)
        self._losses = Losses(session.notices)
        held_out.show = self._losses.evaluated
        if saved is not None and options.keep_best:
            held_out.improved = partial(saved.save_best, self._state)
        self._tokens = 0
        self._start = time.perf_counter()
        self._ended = Ended.EARLIER

    def summary(self) -> FitSummary:
        """The summary so far; waits for the last loss."""
        self._losses.finish()
        seconds = time.perf_counter() - self._start
        return FitSummary(
            steps=self._ending.taken,
            last_step=self._session.steps,
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
            monitored=self._held_out.monitored,
        )

    def run(self) -> Generator[StepResult, None, None]:
        """The results of all steps; each step runs when its result is requested."""
        self._start = time.perf_counter()
        if self._saved is not None and self._saved.done:
            return
        guarded = nullcontext() if self.folder is None else self._ending.stop.on_sigterm()
        session, ending, last = self._session, self._ending, self._last
        showing = shown_progress(self._total, session.steps, self._options.progress)
        with showing as self._losses.display, guarded, told(self._callbacks, self._trainer):
            if self._saved is not None and self._saved.source is not None:
                self._losses.display.say(f"resumed from {shown(self._saved.source)}")
            try:
                while ending.continues():
                    if last is not None and session.steps >= last:
                        break
                    if self._held_out.impatient or (result := self._round()) is None:
                        break
                    for callback in self._callbacks:
                        callback.on_step(session.steps, result)
                    self._held_out.after_step(session.steps)
                    yield result
                    if self._saved is not None:  # the caller has seen it: resuming leaves no gap
                        self._saved.after_step(self._state)
                self._losses.finish()
                self._ended = self._reason()
                if ending.vote in (Vote.GO, Vote.OVER) and session.steps > self._first:
                    self._held_out.at_end(session.steps)
            except BaseException as error:
                ending.leave(error, self._losses.display)
                raise
            asked = ending.finish()
            ending.refuse_other_ends(has_batch=self._position.has_batch)
            self._warn_of_end()
            if asked:
                ending.say_stopped(self._losses.display)
                ending.stop.end()

    def shortened(self, error: BaseException) -> BaseException:
        """``error`` without its traceback, if that says nothing to the caller."""
        return self._ending.shortened(error)

    def refuse_last(self) -> None:
        """Refuse a loader whose last batch will be refused, before the first step."""
        if self._options.rows or (self._saved is not None and self._saved.done):
            return
        if (parts := self._position.parts) > 1:
            self._session.notices.give(
                Notice.SAMPLER,
                f"the loader's DistributedSampler gives 1 of {parts} parts of the dataset, and the "
                "others are never trained on: a batch here is that of all devices, and the "
                "strategy divides it; leave the sampler out (shuffle=True)",
            )
        steps = None if self._last is None else self._last - self._session.steps
        rows = self._position.last_rows(self._session.program.example.size, steps)
        if rows is None:
            return
        try:
            training_calls.refuse_rows(self._session, rows, self._options.pad)
        except PiperError as error:
            if not self._position.collates:
                raise
            self._session.notices.give(
                Notice.LAST,
                f"the loader's last batch has {counted(rows, 'row')}, unless its collate_fn adds "
                f"some; fit would end there with an error: {error}",
            )

    @property
    def _last(self) -> int | None:
        """The step to end with."""
        return None if self._steps is None else self._first + self._steps

    @property
    def _total(self) -> int | None:
        """The last step, if it is known before."""
        ends = [self._last, None if (n := self._position.total) is None else self._first + n]
        return min((end for end in ends if end is not None), default=None)

    def _reason(self) -> Ended:
        vote, epochs = self._ending.vote, self._options.epochs
        if vote is Vote.GO:
            return Ended.PATIENCE if self._held_out.impatient else Ended.STEPS
        if vote is Vote.ASKED:
            return Ended.ASKED
        if vote is Vote.OVER and epochs is not None and self._position.epochs >= epochs:
            return Ended.EPOCHS
        return Ended.BATCHES  # after Vote.LEFT not reported: the loop ends with an error

    def _round(self) -> StepResult | None:
        """Train on the next batch; None if there is none, if another process ends here, or if the
        evaluation after an epoch ends the run."""
        session, ending = self._session, self._ending
        batch = self._position.take()
        if batch is None and not self._position.over:
            self._held_out.after_epoch(session.steps)
            if self._held_out.impatient:
                return None
            batch = self._position.take()
        with held_back():  # from the agreement to continue until the end of the step
            if not ending.agreed(Vote.OVER if batch is None else Vote.GO):
                return None
            assert batch is not None
            with ending.stepping():
                result = training_calls.step(
                    session,
                    arguments_of(batch),
                    rows=self._options.rows,
                    pad=self._options.pad,
                    observe=self._observations.of(session.steps + 1),
                )
                self._position.trained()
            self._tokens += result.tokens
        self._losses.add(session.steps, result)
        return result

    def _warn_of_end(self) -> None:
        """Warn if the loop ended in a way that the caller may not expect; refuse one without
        batches."""
        taken, step = self._ending.taken, self._session.steps
        if taken == 0 and self._saved is not None and self._saved.resumed is not None:
            warn(
                f"this call trains nothing: the run was resumed from step {step}, and there "
                f"{self._ended.value}; give more steps=, or call again for another pass"
            )
        elif self._ended is Ended.BATCHES and taken == 0:
            raise PiperError(f"there is no batch to train on: {self._position.why_empty}")
        elif self._ended is Ended.BATCHES and self._wanted is not None:
            self._session.notices.give(
                Notice.BATCHES,
                f"the batches ended after {self._wanted}, and cannot be begun again; {READ_ONCE}",
            )

    @property
    def _wanted(self) -> str | None:
        """How many of the steps or epochs that were asked for are done."""
        if self._steps is not None:
            done = self._session.steps - self._first
            return f"{done} of {counted(self._steps, 'step')}"
        epochs = self._options.epochs
        return None if epochs is None else f"{self._position.epochs} of {counted(epochs, 'epoch')}"


class Loop(Iterator[StepResult]):
    """The iterator that ``Trainer.iterate`` returns."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._results = rounds.run()  # without a reference to this object, whose deletion ends it
        self._begun = False

    def __next__(self) -> StepResult:
        self._begun = True
        try:
            return next(self._results)
        except KeyboardInterrupt as pressed:
            raise self._rounds.shortened(pressed) from None

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
