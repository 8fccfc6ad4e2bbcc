"""Evaluations of a session: batches of any size enter, one result leaves."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from piper.base.errors import PiperError
from piper.capture.batch import Pad
from piper.capture.code.totals import Totals, summed
from piper.launch import running
from piper.launch.evaluation.pieces import EvaluationSums, RowPiece, RowPieces
from piper.launch.trainer.batch_tensors import batches_in
from piper.launch.trainer.notices import Notice
from piper.launch.trainer.padding import other_filling, padded
from piper.launch.trainer.session import Session
from piper.launch.trainer.step_result import StepResult

_NOISE, _LOW_NOISE = 1e-6, 1e-3
"""The relative difference of two equal losses if experts compute on other rows beside those that
count, in fp32 and below."""


def evaluate(
    session: Session,
    given: Sequence[Any],
    *,
    pad: Pad | None,
    rows: bool,
    lengths: Pad | None = None,
) -> StepResult:
    """``Trainer.evaluate``. ``lengths`` fills up shorter rows as ``pad`` does, but adds no row."""
    start = time.perf_counter()
    session.failed = True
    pieces: Iterable[RowPiece] = _pieces(session, given, pad, lengths, rows=rows)
    totals: list[Tensor] = []
    if (wanted := session.program.codes[1].totals) is not None:
        pieces = list(pieces)
        totals = _totals_of(session, wanted, pieces, rows=rows)
    sums = EvaluationSums()
    for piece in pieces:
        with session.undisturbed():
            session.go_to_shape_of(piece.batch, rows=rows)
            inputs = [*session.tensors(piece.batch, rows=rows), *totals]
            report = running.evaluate(session.whole, session.program, inputs, own_rows=rows)
            sums.add(report, session.program, piece)
    with session.undisturbed():
        report = sums.report(session.program)
        session.failed = False
        seconds = time.perf_counter() - start
        result = StepResult(report, session.program, seconds, sums.tokens, evaluated=True)
    if math.isnan(float(result)):
        count = () if report.total is None else report.total[1:]
        empty = any(not bool(x.any()) for x in (*totals, *count))
        session.notices.give(
            Notice.EVALUATION,
            "the loss of this evaluation is nan: "
            + (
                "no target counts; are all labels -100?"
                if empty
                else "look at the batches and, after training, at the loss of its last steps"
            ),
        )
    return result


def refuse_read_padding(session: Session, batch: Sequence[Any], pad: Pad | None) -> None:
    """Refuse ``batch`` if its loss depends on the content of the positions that ``pad`` fills.

    Before the first batch with shorter rows, two evaluations of it differ in these positions alone.
    A model that masks them, or that is causal, gives the same loss.
    """
    program = session.shapes.first
    if pad is None or session.ignores_padding:
        return
    if (other := other_filling(program, batch, pad)) is None:
        return
    usual = padded(program, batch, pad, rows=False)
    result = evaluate(session, usual, pad=None, rows=False)
    first, second = float(result), float(evaluate(session, other, pad=None, rows=False))
    low = any(x.dtype.itemsize < 4 for x in program.codes[1].parameters.values())
    bound = (_LOW_NOISE if low else _NOISE) * abs(first) if result.expert_load else 0.0
    if abs(first - second) > bound:
        raise PiperError(
            "pad= fills up rows with positions that this model reads: with other values there, the "
            f"loss is {second:.8g} and not {first:.8g}. Give the model a mask of them among its "
            "inputs (attention_mask, padded with 0), or allow a program for each length "
            "(piper.launch(program, shapes=))"
        )
    session.ignores_padding = first == first
    session.failed = True  # the caller goes on


def _pieces(
    session: Session, given: Sequence[Any], pad: Pad | None, lengths: Pad | None, *, rows: bool
) -> Iterator[RowPiece]:
    """All batches in pieces of the program's size."""
    pieces = RowPieces(session.shapes, pad, lengths, rows=rows)
    for batch in batches_in(session.program, given):
        with session.undisturbed():
            ready = pieces.of(batch)
            refuse_read_padding(session, batch, pad or lengths)
            session.look_at_padding(batch, pad)
        yield from ready
    with session.undisturbed():
        ready = pieces.rest()
    yield from ready


def _totals_of(
    session: Session, totals: Totals, pieces: Sequence[RowPiece], *, rows: bool
) -> list[Tensor]:
    """The totals over all rows, as inputs of every piece."""
    if not pieces:
        return []
    sums = []
    with session.undisturbed():
        for piece in pieces:
            program = session.program_for(piece.batch, rows=rows)
            tensors = session.tensors(piece.batch, program, rows=rows)
            terms = session.sums(program.codes[1], tensors, rows=rows)
            sums.append([x / piece.copies for x in terms])
        parts = sum(totals.parts / piece.copies for piece in pieces)
        return totals.of_sums(summed(sums), parts)
