"""Training steps of a session: one batch enters, its result leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from piper.base.errors import PiperError
from piper.base.units import class_text
from piper.capture.batch import Pad
from piper.launch import running
from piper.launch.device.report import ProfileKind, Report
from piper.launch.evaluation.evaluate import refuse_read_padding
from piper.launch.trainer.batch_tensors import (
    batch_in,
    first_tensor,
    rows_in,
    tensors_of,
    tokens_of,
)
from piper.launch.trainer.notices import Notice
from piper.launch.trainer.padding import is_filled, padded
from piper.launch.trainer.session import Session
from piper.launch.trainer.step_result import StepResult


def step(
    session: Session,
    batch: Sequence[Any],
    *,
    pad: Pad | None,
    rows: bool,
    report: bool = True,
    observe: ProfileKind | None = None,
) -> StepResult:
    """``Trainer.step``, measured if ``observe`` says what to measure."""
    program = session.program
    if program.training.optimizer is None:
        session.notices.give(
            Notice.OPTIMIZER,
            "the program was compiled without optimizer=: steps compute gradients, and update "
            "no parameter; give piper.compile an optimizer, or trainer.evaluate the batches",
        )
    with session.undisturbed():
        session.saving.settle(wait=False)
        result = _trained(session, batch, pad, report=report, rows=rows, observe=observe)
        session.steps += 1
        if program.training.optimizer is not None:
            session.unread.train()
    session.notices.look_at_rates(session.steps, result.learning_rates)
    if (loss := result.loss_on_host) is not None:
        session.notices.look_at(session.steps, loss)
    if program.training.on_nan == "stop" and result.skipped:
        raise PiperError(
            f"the gradients of step {session.steps} are not finite (on_nan='stop'): it changed no "
            "parameter and no state of the optimizer. Look at its batch, at the learning rate "
            "and, in bf16, at the loss; on_nan='skip' continues with the next batch"
        )
    return result


def observed(session: Session, batch: Sequence[Any], what: ProfileKind) -> Report:
    """The report of a step on ``batch`` with ``what`` in it."""
    with session.undisturbed():
        inputs = _inputs(session, batch, rows=False)
        report = running.train(session.whole, session.program, inputs, observe=what)
        session.steps += 1
    return report


def refuse_rows(session: Session, rows: int, pad: Pad | None) -> None:
    """Refuse batches with fewer rows than the example now, if a step would refuse them."""
    first = session.shapes.first
    batch = first.example.resized(rows).given
    if pad is not None:
        padded(first, batch, pad, rows=False)
    elif not session.shapes.most:
        tensors_of(first, batch)


def _trained(
    session: Session,
    given: Sequence[Any],
    pad: Pad | None,
    *,
    report: bool,
    rows: bool,
    observe: ProfileKind | None,
) -> StepResult:
    start = time.perf_counter()
    session.failed = True
    batch = batch_in(session.program, given)
    if batch is None:
        raise PiperError(
            f"trainer.step takes one batch, and {class_text(given[0])} gives many: "
            "trainer.fit(batches) trains on all of them"
        )
    whole = padded(session.shapes.first, batch, pad, rows=rows)
    refuse_read_padding(session, batch, pad)
    session.go_to_shape_of(whole, rows=rows)
    program, inputs = session.program, _inputs(session, whole, rows=rows)
    session.look_at_padding(batch, pad)
    trained = running.train(
        session.whole, program, inputs, report=report, own_rows=rows, observe=observe
    )
    seconds = time.perf_counter() - start
    session.failed = False
    example = program.example
    count = example.size if pad is None else rows_in(example, example.built_like(*batch))
    if pad is not None and is_filled(batch, whole):  # single numbers would include the padding
        trained = replace(trained, outputs={})
    first = first_tensor(batch) if pad is not None else None
    tokens = tokens_of(example, count) if first is None else first.numel()
    return StepResult(trained, program, seconds, tokens)


def _inputs(session: Session, batch: Sequence[Any], *, rows: bool) -> list[Tensor]:
    """The input tensors of a training step."""
    session.refuse_averaged()
    tensors, code = session.tensors(batch, rows=rows), session.program.codes[0]
    if (totals := code.totals) is None:
        return tensors
    sums = session.sums(code, tensors, rows=rows)
    return [*tensors, *totals.of_sums(sums, totals.parts)]
