"""Converts plain values to JSON and back exactly: state of schedulers and optimizer groups.

Numbers, text, lists and dicts with string keys stay as they are. Other types become an object with
one key that begins with "!": {"!tuple": [1, 2]}. A numpy scalar becomes a Python number. A value
that cannot be restored without running code, such as a function, is refused when it is written.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
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
    within,
    wrong,
)

_DEPTH = 16
_INLINE = 16
"""Tensors of up to this many elements are written inline, as numbers."""

Store = Callable[[Tensor], str]
"""Stores a tensor outside the JSON and returns its name."""
Find = Callable[[str], Tensor]


def to_json(item: Any, store: Store | None = None, depth: int = 0) -> Any:
    """``item`` as JSON types. Larger tensors go to ``store``, if it is given."""
    if depth > _DEPTH:
        raise MalformedError("this is nested too deeply")

    def each(items: Any) -> list[Any]:
        written = []
        for place, element in enumerate(items):
            with within(place):
                written.append(to_json(element, store, depth + 1))
        return written

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
        case bytes():
            return {"!bytes": item.hex()}
        case float():
            return float(item) if math.isfinite(item) else {"!float": repr(float(item))}
        case complex():
            return {"!complex": each((item.real, item.imag))}
        case torch.dtype():
            return {"!dtype": str(item).removeprefix("torch.")}
        case Tensor():
            return _tensor(item, store)
        case Counter():
            return {"!counter": [each(pair) for pair in item.items()]}
        case dict():
            return _table(item, store, depth)
        case tuple():
            return {"!tuple": each(item)}
        case list():
            return each(item)
        case set() | frozenset():
            return {"!set": each(sorted(item, key=repr))}
        case deque():
            return {"!deque": [item.maxlen, each(item)]}
        case _:
            raise MalformedError(
                f"{shown(item)} is a {type(item).__name__}: a checkpoint holds tensors, numbers, "
                "text and containers of these"
            )


def _table(item: dict[Any, Any], store: Store | None, depth: int) -> dict[str, Any]:
    named = all(isinstance(key, str) and not key.startswith("!") for key in item)
    pairs = []
    for key, value in item.items():
        with within(str(key)):
            written = key if named else to_json(key, None, depth + 1)
            pairs.append([written, to_json(value, store, depth + 1)])
    return dict(pairs) if named else {"!table": pairs}


def _tensor(item: Tensor, store: Store | None) -> Any:
    if item.layout is not torch.strided or item.is_quantized or item.is_meta:
        raise MalformedError(f"{shown(item)} is not a plain tensor")
    item = item.detach()
    if store is not None and item.numel() > _INLINE:
        return {"!stored": store(item)}
    flat = [to_json(x) for x in item.flatten().tolist()]
    dtype = str(item.dtype).removeprefix("torch.")
    return {"!tensor": [dtype, list(item.shape), flat]}


def from_json(data: Any, find: Find | None = None) -> Any:
    """The inverse of ``to_json``. ``find`` returns a stored tensor by its name."""
    match data:
        case None | bool() | int() | float() | str():
            return data
        case list():
            return _each(data, find)
        case dict() if not any(key.startswith("!") for key in data):
            values = {}
            for key, value in data.items():
                with within(key):
                    values[key] = from_json(value, find)
            return values
        case dict() if len(data) == 1:
            ((kind, content),) = data.items()
            with within(kind):
                try:
                    return _tagged(kind, content, find)
                except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
                    raise MalformedError(f"{shown(content)} is not its content: {error}") from None
        case _:
            raise wrong(data, "a plain value")


def _each(items: Any, find: Find | None) -> list[Any]:
    return rows(items, lambda one: from_json(one, find))


def _tagged(kind: str, content: Any, find: Find | None) -> Any:
    match kind:
        case "!float" if content in ("inf", "-inf", "nan"):
            return float(content)
        case "!complex":
            real, imaginary = _each(content, find)
            return complex(real, imaginary)
        case "!bytes":
            return bytes.fromhex(content)
        case "!dtype":
            return DTYPES[content]
        case "!tuple":
            return tuple(_each(content, find))
        case "!set":
            return set(_each(content, find))
        case "!counter":
            return Counter(dict(_each(content, find)))
        case "!deque":
            limit, items = content
            return deque(_each(items, find), limit)
        case "!table":
            return dict(_each(content, find))
        case "!tensor":
            dtype, shape, items = content
            if math.prod(shape) != len(items):
                raise ValueError(f"{len(items)} numbers are not of shape {shape}")
            return torch.tensor(_each(items, find), dtype=DTYPES[dtype]).reshape(shape)
        case "!stored" if find is not None:
            return find(content)
        case _:
            raise wrong({kind: content}, "a plain value")


def stored_names(data: Any) -> list[str]:
    """The names of the stored tensors that a value in JSON refers to."""
    if type(data) is list:
        return [name for one in data for name in stored_names(one)]
    if type(data) is dict:
        if data.keys() == {"!stored"}:
            return [data["!stored"]]
        return [name for one in data.values() for name in stored_names(one)]
    return []
