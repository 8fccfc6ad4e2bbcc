"""Warnings about models whose loss on microbatches does not equal the loss on the whole batch."""

from __future__ import annotations

from collections.abc import Iterable

from piper.base.errors import CaptureError, warn
from piper.capture.loss.row_mixing import MixingKind, RowMixing
from piper.capture.model import Captured

_SAID = {
    MixingKind.STATISTICS: (
        "{op} takes its statistics from {rows} of the {size} rows of a batch at a time: those of "
        "one microbatch on one replica, as gradient accumulation has them everywhere. For those of "
        "the whole batch, give one microbatch and one replica, or use a norm of each row "
        "(LayerNorm, GroupNorm)"
    ),
    MixingKind.ROWS: (
        "{op} computes rows of the batch from one another, and sees {rows} of {size} rows at a "
        "time: those of one microbatch on one replica. The result is not that of the whole batch: "
        "give one microbatch and one replica, or do it outside the step"
    ),
    MixingKind.MEAN: (
        "the loss is not linear in its sum or mean over rows: {op} is computed from {rows} of "
        "{size} rows at a time, one microbatch on one replica, and the loss is the mean of the "
        "results. It is not that of the whole batch: give one microbatch and one replica, or a "
        "loss that is a mean over rows"
    ),
}


def warn_of_mixing(captured: Iterable[Captured]) -> None:
    """Warn of the first operation that needs the whole batch, if a device sees only part of it."""
    for each in captured:
        if each.mixing is not None and each.microbatches > 1:
            size = each.example.size
            _say(each.mixing, size // each.microbatches, size)
            return


def _say(mixing: RowMixing, rows: int, size: int) -> None:
    at = f"\n{mixing.at}" if mixing.at else ""
    if mixing.kind is MixingKind.OFFSETS:
        raise CaptureError(
            f"a tensor of the batch holds offsets ({mixing.op} of it) and would be cut into "
            f"microbatches and replicas like rows, {rows} of {size} numbers each: pad the "
            "sequences to rows of one length, or give one microbatch and one replica" + at
        )
    warn(_SAID[mixing.kind].format(op=mixing.op, rows=rows, size=size) + at)
