"""Converts frozen dataclasses to plain JSON data with named fields and back, by their type hints.

Supports dataclasses, named tuples, enums, tuples, mappings, unions, torch dtypes and plain values.
A tuple of many dataclasses may be written by columns, with equal items written once. Input is
untrusted: every item has the hinted type, or a ``MalformedError`` says where it does not. Every
file begins with a ``Format``.

Written by hand although msgspec would do most of it: Piper must run on GPU machines where nothing
can be installed.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch

from piper.base.errors import PiperError
from piper.base.reading import (
    MalformedError,
    dtype,
    each,
    pairs,
    place_text,
    row,
    rows,
    shown,
    string,
    table,
    whole,
    within,
    wrong,
)

_WRITTEN = "written"


@dataclass(frozen=True, slots=True)
class Format:
    """The name and version of a file format."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"piper {self.name} {self.version}"

    def headed(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """``content`` with this format's name and version as the first entry."""
        return {"format": str(self), **content}

    def content(self, data: Any) -> dict[str, Any]:
        """The inverse of ``headed``. Refuses other data and other versions."""
        format_name = data.get("format") if type(data) is dict else None
        if format_name != str(self):
            other = shown(format_name) if type(format_name) is str else "nothing that Piper wrote"
            raise MalformedError(
                f"this holds {other}, not {str(self)!r}: write it again with this version of Piper"
            )
        return {name: item for name, item in data.items() if name != "format"}


def written_as(kind: Any) -> Mapping[str, Any]:
    """Field metadata: files store the field as type ``kind``."""
    return {_WRITTEN: kind}


ADDED: Mapping[str, Any] = {"added": True}
"""Field metadata: files of earlier versions lack the field, which must have a default."""
COLUMNS: Mapping[str, Any] = {"columns": True}
"""Field metadata: the field is a tuple of many dataclasses and is written by columns."""


def encode(kind: Any, item: Any) -> Any:
    """``item``, of type ``kind``, as JSON data."""
    return _form(kind).write(item)


def decode(kind: Any, data: Any) -> Any:
    """The object of type ``kind`` that ``encode`` wrote as ``data``. Refuses anything else."""
    return _form(kind).read(data)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a type is written and read."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


@cache
def _form(kind: Any) -> _Form:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin in (dict, Mapping):
        return _mapping(*map(_form, arguments))
    if kind in _PLAIN:
        return _Form(lambda item: item, _PLAIN[kind])
    if kind is torch.dtype:
        return _Form(lambda item: str(item).removeprefix("torch."), dtype)
    if issubclass(kind, Enum):
        return _enum(kind)
    return _record(kind, _fields(kind))


def _mapping(key: _Form, value: _Form) -> _Form:
    def write(item: Any) -> Any:
        return [[key.write(k), value.write(v)] for k, v in item.items()]

    return _Form(write, lambda data: pairs(data, key.read, value.read))


def _union(arguments: tuple[Any, ...]) -> _Form:
    """A union. Between several dataclasses, files name the one they hold. Between other types,
    reading tries each in turn; the error is that of the last one."""
    kinds = [a for a in arguments if a is not types.NoneType]
    optional = types.NoneType in arguments
    if len([kind for kind in kinds if is_dataclass(kind)]) > 1:
        form = _tagged(kinds)
    elif len(kinds) == 1:
        form = _form(kinds[0])
    else:
        form = _first_of(kinds)
    if not optional:
        return form
    return _Form(
        lambda item: None if item is None else form.write(item),
        lambda data: None if data is None else form.read(data),
    )


def _tagged(kinds: list[Any]) -> _Form:
    forms = {kind.__name__: _form(kind) for kind in kinds}

    def write(item: Any) -> Any:
        name = type(item).__name__
        return {name: forms[name].write(item)}

    def read(data: Any) -> Any:
        if type(data) is not dict or len(data) != 1 or not data.keys() <= forms.keys():
            raise wrong(data, f"an object with one of {', '.join(forms)}")
        ((name, item),) = data.items()
        with within(name):
            return forms[name].read(item)

    return _Form(write, read)


def _first_of(kinds: list[Any]) -> _Form:
    forms = [(typing.get_origin(kind) or kind, _form(kind)) for kind in kinds]

    def write(item: Any) -> Any:
        return next(form for kind, form in forms if isinstance(item, kind)).write(item)

    def read(data: Any) -> Any:
        for _, form in forms[:-1]:
            try:
                return form.read(data)
            except MalformedError:
                continue
        return forms[-1][1].read(data)

    return _Form(write, read)


def _tuple(arguments: tuple[Any, ...]) -> _Form:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        if arguments[0] in _PLAIN:
            read = _PLAIN[arguments[0]]
            return _Form(list, lambda data: tuple(each(rows(data), read)))
        form = _form(arguments[0])
        return _Form(
            lambda item: [form.write(x) for x in item],
            lambda data: tuple(each(rows(data), form.read)),
        )
    forms = [_form(a) for a in arguments]

    def write(item: Any) -> Any:
        return [form.write(x) for form, x in zip(forms, item, strict=True)]

    def read_all(data: Any) -> Any:
        items = []
        for place, (form, x) in enumerate(zip(forms, row(data, len(forms)), strict=True)):
            with within(place):
                items.append(form.read(x))
        return tuple(items)

    return _Form(write, read_all)


def _enum(kind: type[Enum]) -> _Form:
    known = {member.value: member for member in kind}

    def read(data: Any) -> Any:
        member = known.get(data) if type(data) is str else None
        if member is None:
            raise wrong(data, f"one of {', '.join(map(str, known))}")
        return member

    return _Form(lambda item: item.value, read)


def _fields(kind: Any) -> dict[str, _Form]:
    """The fields of a dataclass or a named tuple."""
    hints = typing.get_type_hints(kind)
    if not is_dataclass(kind):
        return {name: _form(hints[name]) for name in kind._fields}
    forms = {}
    for field in fields(kind):
        hint = field.metadata.get(_WRITTEN, hints[field.name])
        columns = "columns" in field.metadata
        forms[field.name] = _columns(typing.get_args(hint)[0]) if columns else _form(hint)
    return forms


def _record(kind: Any, forms: Mapping[str, _Form]) -> _Form:
    writers = [(name, form.write) for name, form in forms.items()]
    readers = [(name, form.read) for name, form in forms.items()]
    added = {f.name for f in fields(kind) if "added" in f.metadata} if is_dataclass(kind) else set()

    def write(item: Any) -> Any:
        return {name: write(getattr(item, name)) for name, write in writers}

    def read(data: Any) -> Any:
        if type(data) is not dict or data.keys() != forms.keys():
            left = added - data.keys() if type(data) is dict else set()
            table(data, [name for name in forms if name not in left])  # says what is wrong
        values = {}
        for name, read in readers:
            if name not in data:
                continue
            try:
                values[name] = read(data[name])
            except MalformedError as error:
                error.at.append(place_text(name))
                raise
        return _made(kind, values)

    return _Form(write, read)


def _columns(kind: Any) -> _Form:
    """Dataclasses by columns. An integer column holds the numbers. Any other column holds the
    distinct items, and for each row its index among them."""
    forms, numbers = _fields(kind), typing.get_type_hints(kind)
    plain = {name for name in forms if numbers[name] is int}

    def write(items: Any) -> Any:
        columns: dict[str, Any] = {}
        for name, form in forms.items():
            column = [getattr(item, name) for item in items]
            if name in plain:
                columns[name] = column
                continue
            distinct = Numbered()
            at = [distinct.number(x) for x in column]
            columns[name] = {"distinct": [form.write(x) for x in distinct.items], "at": at}
        return columns

    def read_column(name: str, data: Any) -> list[Any]:
        if name in plain:
            return rows(data, forms[name].read)
        table(data, ("distinct", "at"))
        with within("distinct"):
            items = rows(data["distinct"], forms[name].read)
        with within("at"):
            return rows(data["at"], lambda n: items[whole(n, 0, len(items))])

    def read(data: Any) -> Any:
        table(data, forms)
        columns = {}
        for name in forms:
            with within(name):
                columns[name] = read_column(name, data[name])
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            raise MalformedError(f"its columns have different lengths: {sorted(lengths)}")
        return tuple(
            _made(kind, dict(zip(columns, values, strict=True)))
            for values in zip(*columns.values(), strict=True)
        )

    return _Form(write, read)


def _made(kind: Any, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except MalformedError:
        raise
    except PiperError as error:  # a type that checks itself
        raise MalformedError(str(error)) from None


def _float(data: Any) -> float:
    if type(data) not in (int, float) or data != data:
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
}


class Numbered:
    """Numbers distinct items from 0. ``items`` lists them in that order."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any) -> int:
        """The number of ``item``; a new item gets the next number."""
        number = self._numbers.get(item)
        if number is None:
            number = self._numbers[item] = len(self.items)
            self.items.append(item)
        return number
