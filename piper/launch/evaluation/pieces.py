"""Batches of any size enter an evaluation; batches of the size that the program takes leave.

Rows are collected until they fill a batch. The rows left at the end are cut into pieces whose sizes
divide a batch, and a batch repeats each row of a piece equally often. Repetition changes neither a
mean over rows nor a quotient of two sums over rows, so nothing is padded and nothing is masked. A
last batch of 11 rows under a program for 8:

    8 rows once    2 rows four times    1 row eight times
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.capture.batch import Batch, Pad
from piper.ir.grouped import grouped
from piper.launch.device.report import Report
from piper.launch.trainer.batch_shapes import BatchShapes
from piper.launch.trainer.batch_tensors import rows_in, tokens_of
from piper.launch.trainer.padding import is_filled, padded
from piper.program.program import Program


@dataclass(frozen=True, slots=True)
class RowPiece:
    """A batch of the program's size, made of some rows."""

    batch: Sequence[Any]
    size: int
    """The number of its rows."""
    copies: int
    """How often it has each row."""
    kept: int
    """The number of its first rows that were given; the others are copies, or padding."""
    filled: bool
    """Whether anything in it is padding."""

    @property
    def weight(self) -> int:
        """The number of rows that it stands for."""
        return self.size // self.copies


class RowPieces:
    """Cuts batches into pieces; rows that do not fill a batch wait for those of the next one."""

    def __init__(
        self, shapes: BatchShapes, pad: Pad | None, lengths: Pad | None, *, rows: bool
    ) -> None:
        """``pad`` and ``rows`` as in ``Trainer.step``; ``lengths`` as in ``evaluate``."""
        self._shapes, self._pad, self._lengths, self._own = shapes, pad, lengths, rows
        self._example = example = shapes.first.example
        self._rows = [isinstance(x, Tensor) and example.has_rows(x) for x in example.leaves]
        paths = map(example.path, range(len(example.leaves)))
        self._counts = any(path.endswith("['num_items_in_batch']") for path in paths)
        self._begun = False
        self._filled = False
        """Whether the rows of any batch so far were filled up."""
        self._rest: Batch | None = None

    def of(self, given: Sequence[Any]) -> list[RowPiece]:
        """The pieces of a batch, and of rows that waited."""
        size = self._example.size
        if self._own or self._pad is not None:
            whole = padded(self._shapes.first, given, self._pad, rows=self._own)
            rows = size if self._own else rows_in(self._example, self._example.built_like(*given))
            return [RowPiece(whole, size, 1, rows, is_filled(given, whole))]
        longer = padded(self._shapes.first, given, self._lengths, rows=self._own, missing=False)
        self._filled |= is_filled(given, longer)
        given, batch = longer, self._example.built_like(*longer)
        known = self._shapes.rows_of(batch)
        if self._counts and (self._begun or known is None):
            raise PiperError(
                "num_items_in_batch is the number of labels of one batch, and an evaluation counts "
                "those of all batches itself: leave it out of the batches, and of inputs="
            )
        if known is None and (mixes := self._shapes.first.codes[1].mixes) is not None:
            raise PiperError(
                "the rows of a batch depend on each other in this model, so a batch cannot be "
                f"split or padded: evaluate batches of {size} rows (drop_last=True). It is {mixes}"
            )
        self._begun = True
        if self._rest is None and known is not None:
            return [RowPiece(given, known, 1, known, self._filled)]
        before = []
        if self._rest is not None and self._follows(batch):
            batch, self._rest = self._joined(self._rest, batch), None
        else:
            before = self.rest()
        if not (count := rows_in(self._example, batch)):
            raise PiperError("a batch to evaluate has no rows: leave it out")
        left = count % size
        if left:
            self._rest = self._part(batch, count - left, left)
        starts = range(0, count - left, size)
        parts = [self._part(batch, i, size).given for i in starts]
        return before + [RowPiece(part, size, 1, size, self._filled) for part in parts]

    def rest(self) -> list[RowPiece]:
        """The pieces of the rows that wait."""
        if (batch := self._rest) is None:
            return []
        self._rest = None
        size, start, count = self._example.size, 0, rows_in(self._example, batch)
        pieces = []
        for rows in (n for n in range(size - 1, 0, -1) if size % n == 0):
            while count - start >= rows:
                part = self._part(batch, start, rows)
                copies = size // rows
                whole = self._joined(*[part] * copies)
                pieces.append(RowPiece(whole.given, size, copies, rows, self._filled))
                start += rows
        return pieces

    def _part(self, batch: Batch, start: int, rows: int) -> Batch:
        leaves = zip(batch.leaves, self._rows, strict=True)
        return replace(
            batch, leaves=tuple(x[start : start + rows] if own else x for x, own in leaves)
        )

    def _joined(self, *parts: Batch) -> Batch:
        columns = zip(self._rows, *(part.leaves for part in parts), strict=True)
        leaves = tuple(torch.cat(row) if own else row[0] for own, *row in columns)
        return replace(parts[0], leaves=leaves)

    def _follows(self, batch: Batch) -> bool:
        """Whether the rows of ``batch`` can be in one batch with those that wait."""
        assert self._rest is not None
        return all(
            own and (x.shape[1:], x.dtype, x.device) == (y.shape[1:], y.dtype, y.device)
            if isinstance(x, Tensor) and isinstance(y, Tensor)
            else not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y
            for own, x, y in zip(self._rows, self._rest.leaves, batch.leaves, strict=True)
        )


class EvaluationSums:
    """The sums of the reports of all pieces, and the rows of their outputs."""

    def __init__(self) -> None:
        self._weight = 0
        self.tokens = 0
        self._reports: list[tuple[Report, RowPiece]] = []
        self._rows: dict[int, list[Tensor]] = {}

    def add(self, report: Report, program: Program, piece: RowPiece) -> None:
        """Add the report of ``piece``."""
        report.scalars()
        returned = report.returned
        blocks = grouped((value, returned[value, i].detach()) for value, i in sorted(returned))
        for value, parts in blocks.items():
            rows = torch.cat([x.to(parts[0].device) for x in parts])
            self._rows.setdefault(value, []).append(rows[: piece.kept])
        if piece.filled:  # single numbers would include the padding
            report = replace(report, outputs={})
        self._reports.append((replace(report, returned={}, ready=None), piece))
        self._weight += piece.weight
        self.tokens += tokens_of(program.example, piece.kept)

    def report(self, program: Program) -> Report:
        """One report: what one evaluation of all rows would give."""
        if not self._reports:
            raise PiperError("there is nothing to evaluate: the loader gives no batch")
        reports, pieces = zip(*self._reports, strict=True)
        if len(reports) == 1 and pieces[0].copies == 1:
            return replace(reports[0], returned=self._returned)
        counted = program.codes[0].count is not None
        shares = [piece.weight / self._weight for piece in pieces]
        parts = [1 / piece.copies for piece in pieces]
        load = _weighted([x.load for x in reports], parts)
        return replace(
            reports[0],
            total=_weighted([{0: x.total} for x in reports], parts if counted else shares)[0],
            outputs=_weighted([x.outputs for x in reports], shares),
            load={chunk: x.round().to(reports[0].load[chunk].dtype) for chunk, x in load.items()},
            memory=max(x.memory for x in reports),
            returned=self._returned,
        )

    @property
    def _returned(self) -> dict[tuple[int, int], Tensor]:
        """By value, the rows of the outputs in the order given, as one block."""
        return {
            (value, 0): torch.cat([x.to(parts[0].device) for x in parts])
            for value, parts in self._rows.items()
        }


def _weighted(parts: Sequence[Mapping[int, Tensor]], weights: Sequence[float]) -> dict[int, Tensor]:
    """The weighted sums, in fp64, of the tensors that are in all mappings."""
    keys = [key for key in parts[0] if all(key in x for x in parts)]
    return {
        key: torch.stack([x[key].double() * w for x, w in zip(parts, weights, strict=True)]).sum(0)
        for key in keys
    }
