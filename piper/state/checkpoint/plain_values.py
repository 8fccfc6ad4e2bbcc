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
    count,
    row,
    rows,
    shown,
    string,
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

    def each(items: Any) -> list[Any]:
        return rows(items, lambda one: from_json(one, find))

    if type(data) is list:
        return each(data)
    if type(data) is not dict:
        if data is not None and type(data) not in (bool, int, float, str):
            raise wrong(data, "a plain value")
        return data
    if not any(key.startswith("!") for key in data):
        values = {}
        for key, value in data.items():
            with within(key):
                values[key] = from_json(value, find)
        return values
    if len(data) != 1:
        raise wrong(data, "a plain value")
    ((kind, content),) = data.items()
    with within(kind):
        return _tagged(kind, content, each, find)


def _tagged(kind: str, content: Any, each: Callable[[Any], list[Any]], find: Find | None) -> Any:
    match kind:
        case "!float":
            if content not in ("inf", "-inf", "nan"):
                raise wrong(content, "inf, -inf or nan")
            return float(content)
        case "!complex":
            real, imaginary = (_real(x) for x in row(each(content), 2))
            return complex(real, imaginary)
        case "!bytes":
            return _bytes(content)
        case "!dtype":
            return _dtype(content)
        case "!tuple":
            return tuple(each(content))
        case "!set":
            return {_hashable(x) for x in each(content)}
        case "!counter":
            pairs = [row(pair, 2) for pair in each(content)]
            return Counter({_hashable(k): _real(n) for k, n in pairs})
        case "!deque":
            limit, items = row(content, 2)
            return deque(each(items), None if limit is None else count(limit))
        case "!table":
            return {_hashable(k): v for k, v in (row(pair, 2) for pair in each(content))}
        case "!tensor":
            return _read_tensor(content, each)
        case "!stored" if find is not None:
            return find(string(content))
        case _:
            raise wrong(kind, "a kind of value")


def _hashable(item: Any) -> Any:
    try:
        hash(item)
    except TypeError:
        raise wrong(item, "a name") from None
    return item


def _real(item: Any) -> Any:
    if type(item) not in (int, float):
        raise wrong(item, "a number")
    return item


def _bytes(item: Any) -> bytes:
    try:
        return bytes.fromhex(string(item))
    except ValueError:
        raise wrong(item, "bytes") from None


def _dtype(item: Any) -> torch.dtype:
    if string(item) not in DTYPES:
        raise wrong(item, "a dtype")
    return DTYPES[item]


def _read_tensor(content: Any, each: Callable[[Any], list[Any]]) -> Tensor:
    name, shape, items = row(content, 3)
    dtype = _dtype(name)
    size = [count(n) for n in rows(shape)]
    flat = each(items)
    if math.prod(size) != len(flat) or any(
        type(x) not in (bool, int, float, complex) for x in flat
    ):
        raise wrong(content, "a tensor")
    try:
        return torch.tensor(flat, dtype=dtype).reshape(size)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise MalformedError(f"this is no tensor: {error}") from None


def stored_names(data: Any) -> list[str]:
    """The names of the stored tensors that a value in JSON refers to."""
    if type(data) is list:
        return [name for one in data for name in stored_names(one)]
    if type(data) is dict:
        if data.keys() == {"!stored"}:
            return [string(data["!stored"])]
        return [name for one in data.values() for name in stored_names(one)]
    return []
