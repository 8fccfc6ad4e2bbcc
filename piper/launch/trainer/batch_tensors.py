"""The tensors of a step's batch: checked against the example, and padded if requested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from piper.base.errors import PiperError
from piper.base.units import class_text
from piper.capture.batch import Batch, Pad
from piper.program.program import Program

_IGNORED = -100
"""The target that ``cross_entropy`` ignores by default."""


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
    if len(rows) == 1 and here < size:
        fits = here % program.loss_parts == 0
        return PiperError(
            f"{error}. A batch has {size} rows here, and this one {here}: drop the last, "
            "smaller batch (drop_last=True), "
            f"{'' if fits else 'or '}pad it, "
            f"pad={_proposed(program, list(map(_leaves, batch)))}, with a loss that ignores the "
            "padding"
            f"{f', or {own}' if fits else ''}"
        )
    if [x.shape for x in tensors] != [x.shape for x in examples]:
        return PiperError(f"{error}. A program is for one shape: pad the batch to it, or {own}")
    return error


def padded(program: Program, batch: Sequence[Any], pad: Pad | None, *, rows: bool) -> Sequence[Any]:
    """``batch`` padded with the values of ``pad``, if given, to the number of rows that ``program``
    takes; ``rows`` says that it has only some rows of a global batch."""
    if pad is None:
        return batch
    if rows:
        raise PiperError(
            "pad= pads a whole batch, and rows=True passes only some of its rows: pad the batch "
            "before taking trainer.rows of it"
        )
    code, _ = program.codes
    totals = code.totals
    if code.count is None and (totals is None or not totals.complete):
        raise PiperError(
            "a padded batch needs a loss that ignores the padding: a mean over the "
            "targets that count (cross_entropy with ignore_index, a masked mean), or (sum, count); "
            "this loss has a mean over all rows"
        )
    given = list(map(_leaves, batch))
    values = _values_of(pad)
    names = [list(one) for one in given]
    if [sorted(one) for one in values] != [sorted(one) for one in names] or not all(
        isinstance(x, Tensor) and _is_number(values[i][name])
        for i, one in enumerate(given)
        for name, x in one.items()
    ):
        count = sum(map(len, given))
        raise PiperError(
            f"pad={pad!r} must give one number for each of the {count} tensors of the batch, by "
            f"name for a dict: built like {_proposed(program, given)}"
        )
    size = program.example.size
    examples = [_leaves(part) for part in program.example.given]
    examples += [{}] * (len(batch) - len(examples))  # surplus inputs are refused later
    padded_batch: list[Any] = []
    for whole, one, fill, example in zip(batch, given, values, examples, strict=False):
        filled = {
            name: _filled(x, fill[name], size)
            if name not in example or program.example.has_rows(example[name])
            else x
            for name, x in one.items()
        }
        padded_batch.append(filled if isinstance(whole, Mapping) else filled[""])
    return padded_batch


def _proposed(program: Program, given: Sequence[Mapping[str, Any]]) -> Any:
    """A ``pad=`` for a batch with the leaves ``given``: integer targets are ignored."""
    fills = [
        {name: _IGNORED if _counts(program, i, name, x) else 0 for name, x in one.items()}
        for i, one in enumerate(given)
    ]
    built = [one.get("", one) for one in fills]
    return tuple(built) if len(built) > 1 else built[0]


def counted_padding(program: Program, batch: Sequence[Any], pad: Pad) -> str | None:
    """A warning if the loss counts the rows that ``pad``, which fits, adds to ``batch``, or if it
    may count them."""
    given, values, size = list(map(_leaves, batch)), _values_of(pad), program.example.size
    ignored = [dict(one) for one in values]
    path, value = "", 0.0
    for i, one in enumerate(given):
        for name, x in one.items():
            short = isinstance(x, Tensor) and x.dim() and x.shape[0] < size
            if short and _counts(program, i, name, x) and values[i][name] != _IGNORED:
                inputs = len(given) - len(program.example.parts[1])
                path = f"inputs[{name!r}]" if name else f"targets[{i - inputs}]"
                value, ignored[i][name] = values[i][name], _IGNORED
    code, _ = program.codes
    known = code.count is None and code.totals is not None
    if not path or (known and _as_many(program, batch, pad, ignored)):
        return None
    return (
        f"pad= fills the integers of {path} with {value}, and padded rows count in the loss unless "
        f"it ignores {value}: pad them with {_IGNORED}, which cross_entropy ignores"
    )


def _as_many(
    program: Program, batch: Sequence[Any], pad: Pad, ignored: Sequence[dict[str, Any]]
) -> bool:
    """Whether a batch padded with ``pad`` has no larger totals than with ``ignored``."""
    totals = program.codes[0].totals
    assert totals is not None
    sums = []
    for fill in (pad, [one.get("", one) for one in ignored]):
        tensors = tensors_of(program, padded(program, batch, fill, rows=False))
        try:
            sums.append(totals.sums(tensors, program.example.size))
        except (IndexError, RuntimeError):  # another class is ignored, and weights have no -100
            return True
    return not any(bool((x > y).any()) for x, y in zip(*sums, strict=True))


def _counts(program: Program, index: int, name: str, x: object) -> bool:
    """Whether a leaf of a batch has integer targets."""
    targets = len(program.example.given) - len(program.example.parts[1])
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    named = any(word in name.lower() for word in ("label", "target"))
    return isinstance(x, Tensor) and x.dtype in kinds and (named or index >= targets)


def _values_of(pad: Pad) -> list[dict[str, Any]]:
    """The values of ``pad`` by input and name."""
    return list(map(_leaves, (pad,) if isinstance(pad, Mapping) else _items(pad)))


def _leaves(part: Any) -> dict[str, Any]:
    """An input by names: a dict as it is, anything else under an empty name."""
    return dict(part) if isinstance(part, Mapping) else {"": part}


def _items(pad: object) -> Sequence[Any]:
    return pad if isinstance(pad, Sequence) and not isinstance(pad, str) else ()


def _is_number(x: object) -> bool:
    return isinstance(x, int | float)


def _filled(x: Tensor, value: float | int, size: int) -> Tensor:
    if not x.dim() or x.shape[0] >= size:
        return x
    rows = torch.full((size - x.shape[0], *x.shape[1:]), value, dtype=x.dtype)
    return torch.cat([x, rows.to(x.device)])


def _tensors(batch: Sequence[Any]) -> list[Tensor]:
    leaves = [leaf for part in batch for leaf in pytree.tree_leaves(_leaves(part))]
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
