"""The tensors of a batch that a step is given, checked against the example, and filled up if asked
for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from piper.errors import PiperError
from piper.program import Program

Pad = Sequence[float | int]


def tensors_of(program: Program, batch: Sequence[Any], pad: Pad | None) -> list[Tensor]:
    """Those of a whole batch."""
    if pad is not None:
        batch = _padded(program, batch, pad)
    try:
        return list(program.example.like(*batch).tensors)
    except PiperError as error:
        raise _smaller(program, batch, error) from None


def tensors_of_rows(
    program: Program, rows: Tensor, batch: Sequence[Any], pad: Pad | None
) -> list[Tensor]:
    """Those of a batch that has only ``rows`` of the whole one."""
    if pad is not None:
        raise PiperError(
            "pad= fills up a whole batch, and rows=True gives some rows of one: pad the batch "
            "before taking trainer.rows of it"
        )
    count = len(rows)
    try:
        return list(program.example.resized(count).like(*batch).tensors)
    except PiperError as error:
        raise PiperError(
            f"{error}. With rows=True a batch has {count} rows here, those that trainer.rows "
            "says, in this order"
        ) from None


def _smaller(program: Program, batch: Sequence[Any], error: PiperError) -> PiperError:
    """``error``, with advice if the batch has only too few rows."""
    rows = {x.shape[0] for x in batch if isinstance(x, Tensor) and x.dim()}
    size = program.example.size
    if len(rows) != 1 or min(rows) >= size:
        return error
    return PiperError(
        f"{error}. A batch has {size} rows here, and this one {min(rows)}: leave the last, "
        "smaller batch out (drop_last=True), or fill it up with pad= and a loss that returns "
        "(sum, count)"
    )


def _padded(program: Program, batch: Sequence[Any], pad: Pad) -> list[Any]:
    if program.code.count is None:
        raise PiperError(
            "a padded batch needs a loss that returns (sum, count), so that the rows that fill "
            "it up do not count; this loss returns a mean"
        )
    values = isinstance(pad, Sequence) and all(isinstance(v, int | float) for v in pad)
    if not values or len(pad) != len(batch) or not all(isinstance(x, Tensor) for x in batch):
        raise PiperError(
            f"pad={pad!r} must give one number for each of the {len(batch)} tensors of the batch"
        )
    size = program.example.size
    found = []
    for x, value in zip(batch, pad, strict=True):
        if x.dim() and x.shape[0] < size:
            rows = torch.full((size - x.shape[0], *x.shape[1:]), value, dtype=x.dtype)
            x = torch.cat([x, rows.to(x.device)])
        found.append(x)
    return found
