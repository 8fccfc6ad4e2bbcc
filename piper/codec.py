"""Frozen dataclasses as plain JSON data and back, led by their type hints.

Understands dataclasses, enums, tuples, mappings, optional fields, torch dtypes and plain values:
what the compiler's data consists of. Shared objects are written once for each place. Nothing that
is read is trusted: every item has the type that is hinted, or a ``MalformedError`` says where it
has not.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch

from piper.errors import PiperError

DTYPES: Mapping[str, torch.dtype] = {
    name: item for name, item in vars(torch).items() if isinstance(item, torch.dtype)
}
"""By the names that files use."""
_WRITTEN = "written"
_LARGEST = 2**63
_SHOWN = 60


class MalformedError(PiperError):
    """Data that is not what it must be, and where it is."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.at: list[str] = []
        """The place, innermost first."""

    def __str__(self) -> str:
        place = "".join(reversed(self.at)).removeprefix(".")
        return f"{place}: {self.what}" if place else self.what


@contextmanager
def within(place: str | int) -> Iterator[None]:
    """What is read here is at ``place``, a name or a number, of what is around it."""
    try:
        yield
    except MalformedError as error:
        error.at.append(_written(place))
        raise


def _written(place: str | int) -> str:
    return f"[{place}]" if isinstance(place, int) else f".{place}"


def shown(item: Any) -> str:
    """``item`` in a message, cut short."""
    text = repr(item)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 4] + " ..."


def wrong(item: Any, wanted: str) -> MalformedError:
    return MalformedError(f"{shown(item)} is not {wanted}")


def parsed(text: str | bytes) -> Any:
    """What JSON says."""
    try:
        return json.loads(text)
    except RecursionError:
        raise MalformedError("this is nested too deeply to be read") from None
    except ValueError as error:
        raise MalformedError(f"this is not JSON: {error}") from None


def whole(item: Any, least: int = -_LARGEST, below: int = _LARGEST) -> int:
    """A whole number of a range."""
    if type(item) is not int:
        raise wrong(item, "a whole number")
    if not least <= item < below:
        raise MalformedError(f"{item} is out of range, which is {least} to {below - 1}")
    return item


def count(item: Any) -> int:
    """A whole number from 0 on."""
    if type(item) is not int or not 0 <= item < _LARGEST:
        raise wrong(item, "a whole number from 0 on")
    return item


def counts(items: Any) -> tuple[int, ...]:
    """A list of whole numbers from 0 on."""
    if type(items) not in (list, tuple):
        raise wrong(items, "a list of whole numbers")
    for place, item in enumerate(items):
        if type(item) is not int or not 0 <= item < _LARGEST:
            with within(place):
                raise wrong(item, "a whole number from 0 on")
    return tuple(items)


def string(item: Any) -> str:
    if type(item) is not str:
        raise wrong(item, "a string")
    return item


def rows(items: Any, read: Callable[[Any], Any] | None = None) -> list[Any]:
    """A list, of which every item is read by ``read``."""
    if type(items) is not list:
        raise wrong(items, "a list")
    return items if read is None else list(_each(items, read))


def row(item: Any, length: int) -> list[Any]:
    """A list of so many items."""
    if type(item) is not list or len(item) != length:
        raise wrong(item, f"a list of {length}")
    return item


def table(item: Any, names: Iterable[str]) -> dict[str, Any]:
    """An object with these names and no others."""
    if type(item) is not dict:
        raise wrong(item, "an object")
    wanted = set(names)
    if missing := sorted(wanted - item.keys()):
        raise MalformedError(f"it lacks {', '.join(missing)}")
    if unknown := sorted(item.keys() - wanted):
        raise MalformedError(f"it has {', '.join(map(shown, unknown))}, which nobody reads")
    return item


def pairs(item: Any, key: Callable[[Any], Any], value: Callable[[Any], Any]) -> dict[Any, Any]:
    """A mapping, written as a list of pairs."""
    found: dict[Any, Any] = {}
    for place, pair in enumerate(rows(item)):
        with within(place):
            first, second = row(pair, 2)
            name = key(first)
            if name in found:
                raise MalformedError(f"{shown(first)} is there twice")
            with within(str(first) if isinstance(first, str) else "value"):
                found[name] = value(second)
    return found


def _each(items: list[Any], read: Callable[[Any], Any]) -> Iterator[Any]:
    for place, item in enumerate(items):
        try:
            yield read(item)
        except MalformedError as error:
            error.at.append(_written(place))
            raise


def dtype(item: Any) -> torch.dtype:
    found = DTYPES.get(item) if type(item) is str else None
    if found is None:
        raise wrong(item, "a dtype")
    return found


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


def written_as(kind: Any) -> Mapping[str, Any]:
    """The metadata of a field that in files is of type ``kind``."""
    return {_WRITTEN: kind}


def decode(kind: Any, data: Any) -> Any:
    """What ``encode`` made of an object of type ``kind``, again; anything else is refused."""
    return _reader(kind)(data)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _any_of(arguments)
    if origin is tuple:
        return _tuple_of(arguments)
    if origin in (dict, Mapping):
        key, value = map(_reader, arguments)
        return lambda data: pairs(data, key, value)
    if issubclass(kind, Enum):
        return _enum_of(kind)
    if is_dataclass(kind):
        return _dataclass_of(kind)
    return _PLAIN[kind]


def _any_of(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    """The first type that fits; a message speaks of the last one."""
    readers = [_reader(a) for a in arguments if a is not types.NoneType]
    optional = types.NoneType in arguments

    def read(data: Any) -> Any:
        if data is None and optional:
            return None
        for reader in readers[:-1]:
            try:
                return reader(data)
            except MalformedError:
                continue
        return readers[-1](data)

    return read


def _tuple_of(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _reader(arguments[0])
        return lambda data: tuple(_each(rows(data), item))
    readers = [_reader(a) for a in arguments]

    def read(data: Any) -> Any:
        found = []
        for place, (reader, x) in enumerate(zip(readers, row(data, len(readers)), strict=True)):
            with within(place):
                found.append(reader(x))
        return tuple(found)

    return read


def _enum_of(kind: type[Enum]) -> Callable[[Any], Any]:
    known = {member.value: member for member in kind}

    def read(data: Any) -> Any:
        found = known.get(data) if type(data) is str else None
        if found is None:
            raise wrong(data, f"one of {', '.join(map(str, known))}")
        return found

    return read


def _dataclass_of(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    readers = [(f.name, _reader(f.metadata.get(_WRITTEN, hints[f.name]))) for f in fields(kind)]

    def read(data: Any) -> Any:
        found = {}
        for (name, reader), x in zip(readers, row(data, len(readers)), strict=True):
            try:
                found[name] = reader(x)
            except MalformedError as error:
                error.at.append(_written(name))
                raise
        try:
            return kind(**found)
        except MalformedError:
            raise
        except PiperError as error:  # a type that checks itself
            raise MalformedError(str(error)) from None

    return read


def _float(data: Any) -> float:
    if type(data) not in (int, float) or math.isnan(data):
        raise wrong(data, "a number")
    return data


def _bool(data: Any) -> bool:
    if type(data) is not bool:
        raise wrong(data, "true or false")
    return data


_PLAIN: Mapping[Any, Callable[[Any], Any]] = {
    int: whole,
    float: _float,
    bool: _bool,
    str: string,
    torch.dtype: dtype,
}
