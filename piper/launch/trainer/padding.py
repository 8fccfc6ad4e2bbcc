"""Batches with fewer or shorter rows than the example, filled up with the values of ``pad=``.

This is exact if the loss ignores what is filled in: missing rows and the targets of missing
positions by its own count, the inputs at missing positions by a mask or because the model is
causal. The first is known when compiling; the second is seen in an evaluation (``padding_check``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.capture.batch import Pad
from piper.program.program import Program

_IGNORED = -100
"""The target that ``cross_entropy`` ignores by default."""


def padded(
    program: Program, batch: Sequence[Any], pad: Pad | None, *, rows: bool, missing: bool = True
) -> Sequence[Any]:
    """``batch`` filled up with the values of ``pad``, if given, to the shapes that ``program``
    takes, to its number of rows only if ``missing``; ``rows`` says that it has only some rows of a
    global batch."""
    if pad is None:
        return batch
    if rows:
        raise PiperError(
            "pad= pads a whole batch, and rows=True passes only some of its rows: pad the batch "
            "before taking trainer.rows of it"
        )
    given, values = list(map(leaves_of, batch)), _values_of(pad)
    names = [list(one) for one in given]
    if [sorted(one) for one in values] != [sorted(one) for one in names] or not all(
        isinstance(x, Tensor) and isinstance(values[i][name], int | float)
        for i, one in enumerate(given)
        for name, x in one.items()
    ):
        count = sum(map(len, given))
        raise PiperError(
            f"pad={pad!r} must give one number for each of the {count} tensors of the batch, by "
            f"name for a dict: built like {proposed(program, given)}"
        )
    whole = _filled(program, batch, values, missing=missing)
    _refuse_counted(program, batch, whole)
    return whole


def is_filled(batch: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Whether ``whole`` is ``batch`` with something filled in."""
    return any(x.shape != y.shape for _, x, y in _pairs(batch, whole))


def other_filling(program: Program, batch: Sequence[Any], pad: Pad) -> Sequence[Any] | None:
    """``batch`` padded with ``pad``, but with its own content at the positions that its rows lack,
    except in targets and masks; None if that makes no difference."""
    values = _values_of(pad)
    usual = _filled(program, batch, values)
    other = _filled(program, batch, values, repeat=True)
    return None if all(torch.equal(x, y) for _, x, y in _pairs(usual, other)) else other


def proposed(program: Program, given: Sequence[Mapping[str, Any]]) -> Any:
    """A ``pad=`` for a batch with the leaves ``given``: integer targets are ignored."""
    fills = [
        {name: _IGNORED if _counts(program, i, name, x) else 0 for name, x in one.items()}
        for i, one in enumerate(given)
    ]
    built = [one.get("", one) for one in fills]
    return tuple(built) if len(built) > 1 else built[0]


def counted_padding(program: Program, batch: Sequence[Any], pad: Pad) -> str | None:
    """A warning if the loss counts what ``pad``, which fits, adds to ``batch``, or if it may count
    it."""
    values = _values_of(pad)
    ignored = [dict(one) for one in values]
    path, value = "", 0.0
    whole = _filled(program, batch, values)
    for (i, name), x, filled in _pairs(batch, whole):
        short = x.shape != filled.shape
        if short and _counts(program, i, name, x) and values[i][name] != _IGNORED:
            path = f"inputs[{name!r}]" if name else f"targets[{i - _first_target(program)}]"
            value, ignored[i][name] = values[i][name], _IGNORED
    code, _ = program.codes
    known = code.count is None and code.totals is not None
    if not path or (known and _as_many(program, [whole, _filled(program, batch, ignored)])):
        return None
    return (
        f"pad= fills the integers of {path} with {value}, and padding counts in the loss unless "
        f"it ignores {value}: pad them with {_IGNORED}, which cross_entropy ignores"
    )


def leaves_of(part: Any) -> dict[str, Any]:
    """An input by names: a dict as it is, anything else under an empty name."""
    return dict(part) if isinstance(part, Mapping) else {"": part}


def _filled(
    program: Program,
    batch: Sequence[Any],
    values: Sequence[Mapping[str, Any]],
    *,
    missing: bool = True,
    repeat: bool = False,
) -> Sequence[Any]:
    """``batch`` with ``values`` in the missing positions of its rows and, if ``missing``, in
    missing rows. With ``repeat`` the positions of inputs have the row's content again."""
    examples = [leaves_of(part) for part in program.example.given]
    examples += [{}] * (len(batch) - len(examples))  # surplus inputs are refused later
    filled_batch: list[Any] = []
    for i, (whole, fill, example) in enumerate(zip(batch, values, examples, strict=False)):
        filled = {}
        for name, x in leaves_of(whole).items():
            like = example.get(name)
            filled[name] = x
            if isinstance(like, Tensor) and isinstance(x, Tensor) and x.dim() == like.dim():
                again = repeat and not _is_target(program, i, name) and not _is_mask(name, x)
                longer = _longer(x, fill[name], like, again)
                rows = missing and program.example.has_rows(like)
                filled[name] = _extended(longer, 0, fill[name], like.shape[0]) if rows else longer
        filled_batch.append(filled if isinstance(whole, Mapping) else filled[""])
    return filled_batch


def _longer(x: Tensor, value: float, like: Tensor, again: bool) -> Tensor:
    """``x`` with ``value`` in the positions that ``like`` has beyond its own, or with its own
    content ``again``."""
    for dim in range(1, x.dim()):
        size = like.shape[dim]
        if again and 0 < x.shape[dim] < size:
            x = x.index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])
        x = _extended(x, dim, value, size)
    return x


def _extended(x: Tensor, dim: int, value: float, size: int) -> Tensor:
    """``x`` with ``value`` up to ``size`` along ``dim``."""
    if x.shape[dim] >= size:
        return x
    shape = [*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :]]
    return torch.cat([x, torch.full(shape, value, dtype=x.dtype).to(x.device)], dim)


def _refuse_counted(program: Program, batch: Sequence[Any], whole: Sequence[Any]) -> None:
    """Refuse to fill up ``batch`` if the loss or a buffer would count that in any case."""
    rows = longer = targets = False
    for (i, name), x, filled in _pairs(batch, whole):
        rows |= x.shape[:1] != filled.shape[:1]
        if x.shape[1:] != filled.shape[1:]:
            longer, targets = True, targets or _is_target(program, i, name)
    code, _ = program.codes
    complete = code.count is not None or (code.totals is not None and code.totals.complete)
    if (rows or targets) and not complete:
        raise PiperError(
            "a padded batch needs a loss that ignores the padding: a mean over the "
            "targets that count (cross_entropy with ignore_index, a masked mean), or (sum, count); "
            f"this loss has a mean over all {'rows' if rows else 'positions'}"
        )
    updated = sorted({name for piece in code.pieces for name in piece.updates})
    if longer and updated:
        raise PiperError(
            "rows cannot be filled up with pad= in this model: its forward changes the buffer "
            f"{updated[0]}, which would count the padding. Give rows of one length, or allow a "
            "program for each length (piper.launch(program, shapes=))"
        )


def _as_many(program: Program, fillings: Sequence[Sequence[Any]]) -> bool:
    """Whether the first of two batches has no larger totals than the second."""
    totals = program.codes[0].totals
    assert totals is not None
    sums = []
    for filled in fillings:
        tensors = program.example.like(*filled).tensors
        try:
            sums.append(totals.sums(tensors, program.example.size))
        except (IndexError, RuntimeError):  # another class is ignored, and weights have no -100
            return True
    return not any(bool((x > y).any()) for x, y in zip(*sums, strict=True))


def _pairs(
    batch: Sequence[Any], whole: Sequence[Any]
) -> Iterator[tuple[tuple[int, str], Tensor, Tensor]]:
    """The tensors of a batch beside those of another one that is built alike, each with the number
    of its input and its name."""
    for i, (one, other) in enumerate(zip(batch, whole, strict=True)):
        others = leaves_of(other)
        for name, x in leaves_of(one).items():
            if isinstance(x, Tensor):
                yield (i, name), x, others[name]


def _first_target(program: Program) -> int:
    return len(program.example.given) - len(program.example.parts[1])


def _is_target(program: Program, index: int, name: str) -> bool:
    """Whether a leaf of a batch is a target, by its place or its name."""
    named = any(word in name.lower() for word in ("label", "target"))
    return named or index >= _first_target(program)


def _counts(program: Program, index: int, name: str, x: object) -> bool:
    """Whether a leaf of a batch has integer targets."""
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return isinstance(x, Tensor) and x.dtype in kinds and _is_target(program, index, name)


def _is_mask(name: str, x: Tensor) -> bool:
    """Whether a leaf says which positions count: by its name, or because it has only 0 and 1."""
    return "mask" in name.lower() or bool(((x == 0) | (x == 1)).all())


def _values_of(pad: Pad) -> list[dict[str, Any]]:
    """The values of ``pad`` by input and name."""
    if isinstance(pad, Mapping):
        return [leaves_of(pad)]
    listed = isinstance(pad, Sequence) and not isinstance(pad, str)
    return list(map(leaves_of, pad)) if listed else []
