"""The tensors of a step's batch, checked against the example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from piper.base.errors import PiperError
from piper.base.units import class_text
from piper.capture.batch import Batch
from piper.launch.trainer.padding import leaves_of, proposed
from piper.program.program import Program


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """The arguments of a step from a batch that a loader yields: a dict or tensor is one input."""
    return (batch,) if isinstance(batch, Mapping | Tensor) else tuple(batch)


def batch_in(program: Program, given: Sequence[Any]) -> Sequence[Any] | None:
    """The batch in the arguments of ``trainer.step`` or ``trainer.evaluate``; None if they are one
    iterable of many. A batch may be one tuple or list, as loaders yield it."""
    if len(given) != 1 or isinstance(given[0], Tensor | Mapping):
        return given
    (only,), example = given, program.example
    if not isinstance(only, tuple | list):
        arrays = hasattr(only, "shape") or isinstance(only, str | type(example.given[0]))
        return None if isinstance(only, Iterable) and not arrays else given
    if _is_built_like(example, given):
        return given
    if not only or (not _is_built_like(example, only) and _is_built_like(example, only[0])):
        return None
    return tuple(only)


def batches_in(program: Program, given: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The batches in the arguments of ``trainer.evaluate``: one, or many in an iterable."""
    one = batch_in(program, given)
    return iter([one]) if one is not None else map(arguments_of, given[0])


def refuse_one_batch(program: Program, batches: Any) -> None:
    """Refuse one batch in place of an iterable of batches."""
    several = isinstance(batches, tuple | list) and len(batches) > 1
    if isinstance(batches, Mapping | Tensor) or (
        several and _is_built_like(program.example, batches)
    ):
        raise PiperError(
            f"batches is {class_text(batches)}, one batch: give an iterable of batches, "
            "fit([batch]), or call trainer.step(batch)"
        )


def _is_built_like(example: Batch, batch: Any) -> bool:
    try:
        example.built_like(*arguments_of(batch))
    except (PiperError, TypeError):
        return False
    return True


def tensors_of(program: Program, batch: Sequence[Any], rows: Tensor | None = None) -> list[Tensor]:
    """The tensors of a batch, which is whole or has only ``rows`` of the whole one."""
    example = program.example if rows is None else program.example.resized(len(rows))
    try:
        return list(example.like(*batch).tensors)
    except PiperError as error:
        if rows is None:
            raise _advised(program, batch, error) from None
        raise PiperError(
            f"{error}. With rows=True a batch has {len(rows)} rows here: those of trainer.rows, "
            "in this order"
        ) from None


def _advised(program: Program, batch: Sequence[Any], error: PiperError) -> PiperError:
    """``error``, with advice if the batch differs from the example only in its shapes."""
    tensors, examples = _tensors(batch), program.example.tensors
    kinds = [(x.dtype, x.dim()) for x in tensors]
    size = program.example.size
    if kinds == [(x.dtype, x.dim() - 1) for x in examples]:
        return PiperError(
            f"{error}. This is one row, and a batch has {size}: give a DataLoader of the rows, "
            f"with batch_size={size}"
        )
    if kinds != [(x.dtype, x.dim()) for x in examples]:
        return error
    rows = {x.shape[0] for x in tensors if x.dim()}
    here = min(rows, default=0)
    own = "allow a program of its own for it (piper.launch(program, shapes=1))"
    fill = f"pad={proposed(program, list(map(leaves_of, batch)))}"
    if len(rows) == 1 and here < size:
        fits = here % program.loss_parts == 0
        return PiperError(
            f"{error}. A batch has {size} rows here, and this one {here}: drop the last, "
            "smaller batch (drop_last=True), "
            f"{'' if fits else 'or '}pad it, {fill}, with a loss that ignores the padding"
            f"{f', or {own}' if fits else ''}"
        )
    lengths = [(x.shape[1:], e.shape[1:]) for x, e in zip(tensors, examples, strict=True)]
    if any(n > most for x, e in lengths for n, most in zip(x, e, strict=True)):
        return PiperError(
            f"{error}. A row is longer here than in the example, and a program is for one shape: "
            "cut it (truncation=True, max_length= of a tokenizer), or compile with an example of "
            f"the longest rows (its shape alone counts) and give {fill}, which fills up shorter "
            f"ones, or {own}"
        )
    if [x.shape for x in tensors] != [x.shape for x in examples]:
        return PiperError(
            f"{error}. Rows are shorter here, and a program is for one shape: fill them up, {fill} "
            f"(an argument of step, fit and evaluate), or {own}"
        )
    return error


def _tensors(batch: Sequence[Any]) -> list[Tensor]:
    leaves = [leaf for part in batch for leaf in pytree.tree_leaves(leaves_of(part))]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def rows_in(example: Batch, batch: Batch) -> int:
    """The number of rows of a batch that is built like ``example``."""
    leaves = zip(example.leaves, batch.leaves, strict=True)
    own = [x for like, x in leaves if isinstance(like, Tensor) and example.has_rows(like)]
    counts = {x.shape[0] if isinstance(x, Tensor) and x.dim() else None for x in own}
    if len(counts) == 1 and (count := counts.pop()) is not None:
        return count
    assert batch.size  # raises if tensors disagree
    return example.like(*batch.given).size  # refused, unless no tensor has rows


def first_tensor(batch: Sequence[Any]) -> Tensor | None:
    """The first tensor of a batch as given, without padding."""
    return next(iter(_tensors(batch)), None)


def tokens_of(example: Batch, rows: int) -> int:
    """The elements of the first tensor of a batch with so many rows."""
    first = example.tensors[0]
    return first.numel() * rows // example.size if example.has_rows(first) else first.numel()
