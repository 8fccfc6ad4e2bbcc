"""Converts plain values to JSON and back exactly: state of schedulers and optimizer groups.

Numbers, text, lists and dicts with string keys stay as they are. Other types become an object with
one key that begins with "!": {"!tuple": [1, 2]}. A numpy scalar becomes a Python number. A value
that cannot be restored without running code, such as a function, is refused when it is written.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piper.base.reading import (
    DTYPES,
    MalformedError,
    check_limits,
    rows,
    shown,
    torch_name,
    within,
    wrong,
)
from piper.base.units import class_text

_DEPTH = 24
_INLINE = 16
"""Tensors of up to this many elements are written inline, as numbers."""

Store = Callable[[Tensor], str]
"""Stores a tensor outside the JSON and returns its name."""
Find = Callable[[str], Tensor]


def _pairs(table: dict[Any, Any]) -> list[list[Any]]:
    return [[key, value] for key, value in table.items()]


def _tensor_of(parts: Any) -> Tensor:
    dtype, shape, items = parts
    if math.prod(shape) != len(items):
        raise ValueError(f"{len(items)} numbers are not of shape {shape}")
    return torch.tensor(items, dtype=DTYPES[dtype]).reshape(shape)


_KINDS: Mapping[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "!float": (float, lambda x: repr(float(x)), float),  # those that JSON lacks
    "!bytes": (bytes, bytes.hex, bytes.fromhex),
    "!complex": (complex, lambda x: [x.real, x.imag], lambda x: complex(*x)),
    "!dtype": (torch.dtype, torch_name, DTYPES.__getitem__),
    "!tensor": (
        Tensor,
        lambda x: [torch_name(x.dtype), list(x.shape), x.flatten().tolist()],
        _tensor_of,
    ),
    "!tuple": (tuple, list, tuple),
    "!set": ((set, frozenset), lambda x: sorted(x, key=repr), set),
    "!deque": (deque, lambda x: [x.maxlen, list(x)], lambda x: deque(x[1], x[0])),
    "!counter": (Counter, _pairs, lambda x: Counter(dict(x))),
    "!table": (dict, _pairs, dict),
}
"""By its key in JSON: a type, its content as other plain values, and the inverse."""


def to_json(item: Any, store: Store | None = None, depth: int = 0) -> Any:
    """``item`` as JSON types. Larger tensors go to ``store``, if it is given."""
    if depth > _DEPTH:
        raise MalformedError("this is nested too deeply")
    if isinstance(item, np.generic):
        item = item.item()
    if isinstance(item, Enum):
        if not isinstance(item, int | float | str):
            raise MalformedError(f"{item} is an enum: use its value, {shown(item.value)}")
        item = item.value
    match item:
        case None | bool():
            return item
        case int():
            check_limits(int(item))  # must be readable again
            return int(item)
        case str():
            return str(item)
        case float() if math.isfinite(item):
            return float(item)
        case list():
            return rows(list(item), lambda one: to_json(one, store, depth + 1))
        case dict() if not isinstance(item, Counter) and all(map(_is_name, item)):
            written = {}
            for key, value in item.items():
                with within(str(key)):
                    written[key] = to_json(value, store, depth + 1)
            return written
        case Tensor():
            if item.layout is not torch.strided or item.is_quantized or item.is_meta:
                raise MalformedError(f"{shown(item)} is not a plain tensor")
            item = item.detach()
            if store is not None and item.numel() > _INLINE:
                return {"!stored": store(item)}
    for kind, (types, parts, _) in _KINDS.items():
        if isinstance(item, types):
            return {kind: to_json(parts(item), store, depth)}
    raise MalformedError(
        f"{shown(item)} is {class_text(item)}: a checkpoint holds tensors, numbers, "
        "text and containers of these"
    )


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("!")


def from_json(data: Any, find: Find | None = None) -> Any:
    """The inverse of ``to_json``. ``find`` returns a stored tensor by its name."""
    match data:
        case None | bool() | int() | float() | str():
            return data
        case list():
            return rows(data, lambda one: from_json(one, find))
        case dict() if all(map(_is_name, data)):
            values = {}
            for key, value in data.items():
                with within(key):
                    values[key] = from_json(value, find)
            return values
        case dict() if len(data) == 1:
            ((kind, content),) = data.items()
            made = find if kind == "!stored" else _KINDS.get(kind, (None,) * 3)[2]
            if made is None:
                raise wrong(data, "a plain value")
            with within(kind):
                content = from_json(content, find)
                try:
                    return made(content)
                except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
                    raise MalformedError(f"{shown(content)} is not its content: {error}") from None
        case _:
            raise wrong(data, "a plain value")


def stored_names(data: Any) -> list[str]:
    """The names of the stored tensors that a value in JSON refers to."""
    if type(data) is list:
        return [name for one in data for name in stored_names(one)]
    if type(data) is dict:
        if data.keys() == {"!stored"}:
            return [data["!stored"]]
        return [name for one in data.values() for name in stored_names(one)]
    return []
