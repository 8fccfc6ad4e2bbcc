"""Frozen dataclasses as plain JSON data and back, led by their type hints.

Understands dataclasses, enums, tuples, mappings, optional fields, torch dtypes and plain values:
what the compiler's data consists of. Shared objects are written once for each place.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch


def encode(item: Any) -> Any:
    """``item`` in types that JSON has."""
    if is_dataclass(item) and not isinstance(item, type):
        return [encode(getattr(item, f.name)) for f in fields(item)]
    if isinstance(item, Enum):
        return item.value
    if isinstance(item, torch.dtype):
        return str(item).removeprefix("torch.")
    if isinstance(item, Mapping):
        return [[encode(key), encode(value)] for key, value in item.items()]
    if isinstance(item, tuple | list | set | frozenset):
        return [encode(x) for x in item]
    return item


def decode(kind: Any, data: Any) -> Any:
    """What ``encode`` made of an object of type ``kind``, again."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in arguments if a is not types.NoneType]
        return None if data is None else decode(inner[0], data)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(decode(arguments[0], x) for x in data)
        return tuple(decode(a, x) for a, x in zip(arguments, data, strict=True))
    if origin is list:
        return [decode(arguments[0], x) for x in data]
    if origin in (dict, Mapping):
        return {decode(arguments[0], key): decode(arguments[1], value) for key, value in data}
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            return kind(data)
        if kind is torch.dtype:
            return getattr(torch, data)
        if is_dataclass(kind):
            hints = _hints(kind)
            pairs = zip(fields(kind), data, strict=True)
            return kind(**{f.name: decode(hints[f.name], x) for f, x in pairs})
        if issubclass(kind, tuple):
            return kind(*data)
    return data


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
