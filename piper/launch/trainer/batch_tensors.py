"""The tensors of a step's batch: checked against the example, and padded if requested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from piper.base.errors import PiperError
from piper.capture.code.executables import Executables
from piper.program.program import Program

Pad = Sequence[Any] | Mapping[str, float | int]
"""Padding values: one number for each tensor, structured like the batch."""


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """The arguments of a step from a batch that a loader yields: a dict or tensor is one input."""
    return (batch,) if isinstance(batch, Mapping | Tensor) else tuple(batch)


def unpacked(program: Program, batch: Sequence[Any], *, evaluated: bool) -> Sequence[Any]:
    """The arguments of ``trainer.step`` or ``trainer.evaluate``; several batches are refused. A
    single tuple or list, as loaders yield it, is unpacked into its arguments."""
    if len(batch) != 1 or isinstance(batch[0], Tensor | Mapping):
        return batch
    (only,) = batch
    expected = program.example.given
    plain = all(isinstance(x, Tensor) for x in expected)
    if isinstance(only, tuple | list):
        many = plain and any(isinstance(x, tuple | list | Mapping) for x in only)
    else:
        arrays = hasattr(only, "shape") or isinstance(only, str | type(expected[0]))
        many = isinstance(only, Iterable) and not arrays
    if many:
        kind = type(only).__name__
        raise PiperError(
            f"trainer.evaluate takes one batch, and a {kind} gives many: evaluate each of them, "
            "for batch in batches: trainer.evaluate(*batch)"
            if evaluated
            else f"trainer.step takes one batch, and a {kind} gives many: trainer.fit(batches) "
            "trains on all of them"
        )
    return tuple(only) if isinstance(only, tuple | list) and len(expected) != 1 else batch


def tensors_of(program: Program, batch: Sequence[Any]) -> list[Tensor]:
    """The tensors of a whole batch."""
    try:
        return list(program.example.like(*batch).tensors)
    except PiperError as error:
        raise _advised(program, batch, error) from None


def with_totals(program: Program, code: Executables, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of a whole batch, and the totals over the batch that ``code`` takes as inputs."""
    if code.totals is None:
        return tensors
    return [*tensors, *code.totals.of(tensors, program.example.size)]


def with_totals_of_all(
    program: Program,
    code: Executables,
    tensors: list[Tensor],
    rows: Tensor,
    everyone: Callable[[Any], list[Any]],
) -> list[Tensor]:
    """Like ``with_totals``, for a batch of which each process has only some ``rows``; ``everyone``
    all-gathers an object over the processes."""
    totals = code.totals
    if totals is None:
        return tensors
    places = {row: place for place, row in enumerate(rows.tolist())}
    size = program.example.size // totals.parts
    mine: dict[int, list[Tensor]] = {}
    for part in range(totals.parts):
        own = range(part * size, (part + 1) * size)
        if all(row in places for row in own):
            at = torch.tensor([places[row] for row in own])
            taken = [x[at.to(x.device)] if _has(x, rows) else x for x in tensors]
            mine[part] = [x.cpu() for x in totals.part(taken)]
    parts = {part: terms for said in everyone(mine) for part, terms in said.items()}
    return [*tensors, *totals.summed(parts)]


def _has(x: Tensor, rows: Tensor) -> bool:
    return x.dim() > 0 and x.shape[0] == len(rows)


def tensors_of_rows(program: Program, rows: Tensor, batch: Sequence[Any]) -> list[Tensor]:
    """The tensors of a batch that has only ``rows`` of the whole one."""
    count = len(rows)
    try:
        return list(program.example.resized(count).like(*batch).tensors)
    except PiperError as error:
        raise PiperError(
            f"{error}. With rows=True a batch has {count} rows here, those that trainer.rows "
            "says, in this order"
        ) from None


def _advised(program: Program, batch: Sequence[Any], error: PiperError) -> PiperError:
    """``error``, with advice if the batch differs from the example only in its shapes."""
    tensors, examples = _tensors(batch), program.example.tensors
    kinds = [(x.dtype, x.dim()) for x in tensors]
    if kinds != [(x.dtype, x.dim()) for x in examples]:
        return error
    rows = {x.shape[0] for x in tensors if x.dim()}
    size, found = program.example.size, min(rows, default=0)
    own = "allow a program of its own for it (piper.launch(program, shapes=1))"
    if len(rows) == 1 and found < size:
        fits = found % program.loss_parts == 0
        return PiperError(
            f"{error}. A batch has {size} rows here, and this one {found}: leave the last, "
            "smaller batch out (drop_last=True), "
            f"{'' if fits else 'or '}fill it up with pad= and a loss that ignores what fills it up"
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
            "pad= fills up a whole batch, and rows=True gives some rows of one: pad the batch "
            "before taking trainer.rows of it"
        )
    code, _ = program.codes
    totals = code.totals
    if code.count is None and (totals is None or not totals.complete):
        raise PiperError(
            "a padded batch needs a loss that ignores the rows that fill it up: a mean over the "
            "targets that count (cross_entropy with ignore_index, a masked mean), or (sum, count); "
            "this loss has a mean over all rows"
        )
    given = list(map(_leaves, batch))
    values = list(map(_leaves, (pad,) if isinstance(pad, Mapping) else _items(pad)))
    names = [list(one) for one in given]
    if [sorted(one) for one in values] != [sorted(one) for one in names] or not all(
        isinstance(x, Tensor) and _is_number(values[i][name])
        for i, one in enumerate(given)
        for name, x in one.items()
    ):
        count = sum(map(len, given))
        built = [dict.fromkeys(one, 0) if "" not in one else 0 for one in given]
        raise PiperError(
            f"pad={pad!r} must give one number for each of the {count} tensors of the batch, by "
            f"name for a dict: built like {tuple(built) if len(built) > 1 else built[0]}"
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


def first_tensor(batch: Sequence[Any]) -> Tensor | None:
    """The first tensor of a batch as given, without padding."""
    return next(iter(_tensors(batch)), None)
