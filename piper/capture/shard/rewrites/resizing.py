"""Replaces sizes in an operation's arguments (``view``, ``expand``, ``zeros``) by a shard's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from piper.capture.operators.grouped_mm import EXPERT_ROWS

_SIZES = ("size", "sizes", "shape")


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
    if target is torch.ops.aten.view.default:
        target = torch.ops.aten.reshape.default  # with other sizes a copy may be needed
    if target is EXPERT_ROWS:
        return target, (*args[:2], shape[0]), kwargs
    names = [argument.name for argument in target._schema.arguments]
    for index, name in ((names.index(n), n) for n in _SIZES if n in names):
        sizes = list(shape)
        if target is torch.ops.aten.unflatten.int:
            dim, old = args[1], args[2]
            first = dim % (len(sizes) - len(old) + 1)
            sizes = sizes[first : first + len(old)]
        if index < len(args):
            args = (*args[:index], sizes, *args[index + 1 :])
        else:
            kwargs[name] = sizes
    return target, args, kwargs
