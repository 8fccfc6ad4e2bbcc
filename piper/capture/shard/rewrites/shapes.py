"""Shapes of shards: what a view makes of them, and their sizes among the arguments of operations
(``view``, ``expand``, ``zeros``).

In row-major order, a device's shard is a run of elements in every period of as many runs as there
are parts; a view keeps this order. So nothing is communicated where a dimension of the result has
the same runs:

    [rows, seq S, 64] ─▶ [rows * seq, 64], a section for each row ─▶ [rows, seq S, 8, 8]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from piper.capture.operators.grouped_mm import EXPERT_ROWS

aten = torch.ops.aten
VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)
_SIZES = ("size", "sizes", "shape")


def viewed(
    shape: Sequence[int], made: Sequence[int], dim: int, sections: int, parts: int
) -> tuple[int, int] | None:
    """The dimension of a view of shape ``made`` that has the parts of dimension ``dim``, and the
    number of its sections that have parts of their own; None if there is none. The dimension of
    ``shape`` has ``sections``."""
    run, rest = divmod(math.prod(shape[dim:]), sections * parts)
    if rest or not run:
        return None
    place, inside, before = None, math.prod(made), 0
    for at, size in enumerate(made):
        period, inside = inside, inside // size
        if run % inside == 0 and period % (run * parts) == 0 and period != before:
            place, before = (at, period // (run * parts)), period
    return place


def takes_sizes(target: Any) -> bool:
    """Whether the arguments of an operation have sizes of its result."""
    schema = getattr(target, "_schema", None)
    names = {argument.name for argument in schema.arguments} if schema else set()
    return target is EXPERT_ROWS or not names.isdisjoint(_SIZES)


def resized(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[int]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The operation and its arguments for a result of ``shape``."""
    args, kwargs = tuple(args), dict(kwargs)
    if not isinstance(target, OpOverload):
        return target, args, kwargs
    if target is aten.view.default:
        target = aten.reshape.default  # with other sizes a copy may be needed
    if target is EXPERT_ROWS:
        return target, (*args[:2], shape[0]), kwargs
    names = [argument.name for argument in target._schema.arguments]
    for index, name in ((names.index(n), n) for n in _SIZES if n in names):
        sizes = list(shape)
        if target is aten.unflatten.int:
            dim, old = args[1], args[2]
            first = dim % (len(sizes) - len(old) + 1)
            sizes = sizes[first : first + len(old)]
        if index < len(args):
            args = (*args[:index], sizes, *args[index + 1 :])
        else:
            kwargs[name] = sizes
    return target, args, kwargs
