"""Evaluations of a session: batches of any size enter, one result leaves."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from piper.capture.batch import Pad
from piper.capture.code.totals import Totals, summed
from piper.launch import running
from piper.launch.evaluation.pieces import EvaluationSums, RowPiece, RowPieces
from piper.launch.trainer.batch_tensors import batches_in
from piper.launch.trainer.session import Session
from piper.launch.trainer.step_result import StepResult


def evaluate(session: Session, given: Sequence[Any], *, pad: Pad | None, rows: bool) -> StepResult:
    """``Trainer.evaluate``."""
    start = time.perf_counter()
    session.failed = True
    pieces: Iterable[RowPiece] = _pieces(session, given, pad, rows=rows)
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
        return StepResult(report, session.program, seconds, sums.tokens, evaluated=True)


def _pieces(
    session: Session, given: Sequence[Any], pad: Pad | None, *, rows: bool
) -> Iterator[RowPiece]:
    """All batches in pieces of the program's size."""
    pieces = RowPieces(session.shapes, pad, rows=rows)
    for batch in batches_in(session.program, given):
        with session.undisturbed():
            ready = pieces.of(batch)
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
