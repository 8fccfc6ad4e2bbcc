"""Checks that a model has the same chunks and the same values between them for every share of the
batch or of the experts that a device may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from piper.base.errors import CaptureError, PiperError
from piper.capture.experts.batch_rows import Rows
from piper.capture.model import Captured
from piper.ir.dag.facts import ChunkFacts, Model, Variant
from piper.ir.passes import RematPolicy


def refuse_different(models: Mapping[int, Model], rows: Mapping[int, int]) -> None:
    """Refuse a model whose chunks differ between group sizes. ``rows`` maps each group size to the
    rows of one device."""
    (size, first), *others = models.items()
    for n, other in others:
        if [_wiring(c) for c in other.chunks] != [_wiring(c) for c in first.chunks]:
            single = [k for k in (size, n) if rows[k] == 1]
            reason = (
                f"of a microbatch each of {single[0]} devices has 1 row, and torch treats "
                "dimensions of size 1 otherwise; give a larger batch or fewer microbatches, or"
                if single
                else "its operations depend on the number of rows;"
            )
            raise PiperError(
                f"the model computes differently on a share of the batch for groups of {n} "
                f"device{'s' * (n > 1)} than for groups of {size}: {reason} give all regions "
                "groups of one size"
            )


def refuse_other_rows(captured: Captured, rows: Mapping[int, Rows]) -> None:
    """Refuse an output whose first dimension is not the batch: outputs are concatenated from the
    rows on each device."""
    for name, value in captured.outputs.items():
        shape = captured.cut.values[value].spec.shape
        if shape and (rows[value] != Rows(0)):
            raise CaptureError(
                f"the output {name!r} does not have the rows of the batch, one after another, in "
                f"its first dimension (of {list(shape)}): transpose it to that, or give a single "
                "number, such as its mean"
            )


def refuse_other_share(whole: Model, share: Model) -> None:
    """Refuse a region that reads or saves other values with a share of its experts than with all of
    them."""
    for mine, other in zip(whole.chunks, share.chunks, strict=True):
        if _wiring(mine) != _wiring(other):
            name = " ".join(f"{k}[{i}]" for k, i in mine.tags.items()) or "model"
            raise PiperError(
                f"region {name} computes differently on a share of its experts: torch treats "
                "dimensions of size 1 otherwise, and there the region has other numbers of experts "
                "and rows; give a larger batch, or a smaller ways="
            )


def with_sorted_shares(whole: Model, share: Model) -> Model:
    """``whole`` with the inputs and saved values of ``share`` for experts on sorted rows: they hold
    the rows in another order. FLOPs stay those of ``whole``: with balanced routing, a device
    receives as many rows as it has."""
    chunks = [
        replace(mine, variants=_costing(other.variants, mine.variants))
        if mine.sorted_rows is not None
        else mine
        for mine, other in zip(whole.chunks, share.chunks, strict=True)
    ]
    return replace(whole, chunks=tuple(chunks))


def _costing(
    variants: Mapping[RematPolicy, Variant], like: Mapping[RematPolicy, Variant]
) -> dict[RematPolicy, Variant]:
    return {
        policy: replace(
            variant,
            passes={
                which: replace(facts, cost=like[policy].passes[which].cost)
                for which, facts in variant.passes.items()
            },
        )
        for policy, variant in variants.items()
    }


def _wiring(chunk: ChunkFacts) -> object:
    passes = {
        policy: {which: (f.reads, f.writes) for which, f in variant.passes.items()}
        for policy, variant in chunk.variants.items()
    }
    return dict(chunk.tags), chunk.parameters, chunk.inputs, chunk.outputs, passes
