"""A digest of what a script gives to ``compile``, equal on all ranks that run the same script.

Objects enter: models, losses, strategies, options. Two ranks with equal digests compile the same
program. Functions count by their code and the values that they use, objects by class and
attributes, parameters by shape and dtype. Equal objects may have different digests on two ranks, if
an attribute depends on the rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, type(None))
_DEPTH = 4
"""Other objects than modules, code and containers count this deep: they may refer to anything."""
_MOST = 10_000
"""Items of a container that count."""


def digest_of(*given: object) -> str:
    """A digest of all objects and what they refer to, each once."""
    digest = hashlib.blake2b(digest_size=16)
    found: list[tuple[object, int]] = []  # holds the objects, so that their ids stay theirs
    numbers: dict[int, int] = {}

    def refer(item: object, depth: int) -> None:
        if isinstance(item, _PLAIN):
            text = repr(item)
        else:
            if id(item) not in numbers:
                numbers[id(item)] = len(found)
                found.append((item, depth))
            text = f"object {numbers[id(item)]}"
        digest.update(text.encode(errors="replace") + b"\0")

    for item in given:
        refer(item, _DEPTH)
    for item, depth in found:  # grows meanwhile
        kind = item if isinstance(item, type) else type(item)
        refer(f"{kind.__module__}.{kind.__qualname__}", 0)
        counted = depth - (not isinstance(item, _FREE))
        for part in _parts(item) if counted >= 0 else ():
            refer(part, counted)
    return digest.hexdigest()


_FREE = (nn.Module, Tensor, Mapping, Set, Sequence, FunctionType, MethodType, CodeType, type)
"""Objects that do not count as a level of depth."""


def _parts(item: Any) -> Iterator[Any]:
    """The objects that ``item`` consists of, in an order that does not depend on the process."""
    if isinstance(item, Tensor):
        yield from (item.dtype, tuple(item.shape), item.requires_grad)
        if type(item) is Tensor and not item.is_meta and item.numel() <= _MOST:
            yield item.detach().cpu().reshape(-1).tolist()  # code may hold it as a constant
    elif isinstance(item, Mapping):
        yield from (part for pair in item.items() for part in pair)
    elif isinstance(item, Set):
        yield from sorted(map(str, item))
    elif isinstance(item, Sequence):
        yield from (len(item), *item[:_MOST])
    elif isinstance(item, FunctionType):
        yield from _parts_of_function(item)
    elif isinstance(item, CodeType):
        yield from (item.co_code, item.co_names, item.co_consts)
    elif isinstance(item, MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, staticmethod | classmethod):
        yield item.__func__
    elif isinstance(item, property):
        yield item.fget
    elif isinstance(item, type):
        yield from _own(item)
    else:
        yield type(item)
        yield from _attributes(item)


def _parts_of_function(function: FunctionType) -> Iterator[Any]:
    yield from (function.__code__, function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        own = isinstance(used, FunctionType | type) and used.__module__ == function.__module__
        if own or isinstance(used, _PLAIN):
            yield used


def _own(kind: type) -> Iterator[Any]:
    """The methods and plain attributes of a class, and its bases; those of torch are equal."""
    if kind.__module__.partition(".")[0] in ("torch", "builtins"):
        return
    methods = (FunctionType, staticmethod, classmethod, property)
    for name, part in vars(kind).items():
        if isinstance(part, methods) or (isinstance(part, _PLAIN) and not name.startswith("__")):
            yield from (name, part)
    yield from kind.__bases__


def _attributes(item: Any) -> Iterator[Any]:
    """The attributes of an object, by name. Private ones count in modules only: elsewhere they hold
    hashes and caches, which differ between processes."""
    private = isinstance(item, nn.Module)
    for name, part in getattr(item, "__dict__", {}).items():
        if private or not name.startswith("_"):
            yield from (name, part)
    for kind in type(item).__mro__:
        slots: Any = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield from (name, getattr(item, name, None))
