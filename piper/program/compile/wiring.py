"""What a strategy needs of a model: the same chunks with the same values between them, whatever
part of the batch or of the experts a device has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from piper.base.errors import CaptureError, PiperError
from piper.capture.code.executables import outputs_of
from piper.capture.experts.batch_rows import Rows
from piper.capture.model import Captured
from piper.ir.dag.facts import ChunkFacts, Model, Variant
from piper.ir.passes import RematPolicy


def refuse_different(models: Mapping[int, Model], rows: Mapping[int, int]) -> None:
    """The model must have the same chunks at every size of group; ``rows`` is what each of its
    devices has."""
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
    """Outputs are put together from the rows that devices have of them."""
    for name, value in outputs_of(captured).items():
        shape = captured.cut.values[value].spec.shape
        if shape and (rows[value] != Rows(0)):
            raise CaptureError(
                f"the output {name!r} does not have the rows of the batch, one after another, in "
                f"its first dimension (of {list(shape)}): transpose it to that, or give a single "
                "number, such as its mean"
            )


def refuse_other_share(whole: Model, share: Model) -> None:
    """On a share of its experts a region must take and keep what it does with all of them."""
    for mine, other in zip(whole.chunks, share.chunks, strict=True):
        if _wiring(mine) != _wiring(other):
            name = " ".join(f"{k}[{i}]" for k, i in mine.tags.items()) or "model"
            raise PiperError(
                f"region {name} computes differently on a share of its experts: torch treats "
                "dimensions of size 1 otherwise, and there the region has other numbers of experts "
                "and rows; give a larger batch, or shard fewer ways="
            )


def with_sorted_shares(whole: Model, share: Model) -> Model:
    """``whole``, in which experts on sorted rows take and keep what a share of them does: the rows
    in another order. It costs what the whole does, since a device gets as many rows as it has, if
    all get as many."""
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
                which: replace(facts, flops=like[policy].passes[which].flops)
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
