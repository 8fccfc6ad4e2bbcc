"""A digest of what a script gives to ``compile``, equal in all processes that run the same script.

Objects enter: models, losses, strategies, options. Processes with equal digests compile the same
program. The user's functions count by their code and by the values that they read, installed ones
by their place, other objects by class and attributes, parameters by shape and dtype. Equal objects
may have different digests in two processes, if an attribute depends on the process.

``Digest.unseen`` names the first thing that may change a program unseen: an object that only C code
can read, or a function that may ask for the time, a file or a random number.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import logging
import os
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import _lru_cache_wrapper, cached_property, partial
from operator import itemgetter
from pathlib import PurePath
from threading import Thread
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from piper.program.cache.installed import is_installed, is_of_installed, is_users

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PLAIN = frozenset((
    bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range,
    slice, torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype,
))  # fmt: skip
"""Types whose text is all that they are."""
_NAMED = (
    GenericAlias, UnionType, PurePath, np.dtype, np.generic,
)  # fmt: skip
"""The same, with subclasses."""
_DESCRIPTORS = (
    WrapperDescriptorType, MethodDescriptorType, GetSetDescriptorType, MemberDescriptorType,
)  # fmt: skip
_READ = (
    object, dict, list, tuple, set, frozenset, OrderedDict, defaultdict, deque, MappingProxyType,
    int, float, str, bytes, *msgspec.Struct.__mro__,
)  # fmt: skip
"""Types of C code whose content counts."""
_CONTAINERS = frozenset((dict, list, tuple, set, frozenset, OrderedDict))
"""Types of which most objects are, and whose objects hold nothing but their items."""
_SHALLOW = 3
"""How deep values of installed code count; the user's count as a whole."""
_MOST = 10**6
"""Objects that count."""
_IMPURE = frozenset((
    "random", "_random", "numpy.random", "time", "datetime", "_datetime", "posix", "posixpath",
    "genericpath", "pathlib", "io", "_io", "secrets", "uuid", "socket", "_socket", "subprocess",
    "tempfile", "importlib", "_imp", "sys", "gc", "inspect", "safetensors", "safetensors.torch",
    "safetensors.numpy", "sqlite3", "urllib.request", "requests.api",
))  # fmt: skip
"""Modules with functions whose results are not those of their arguments."""
_ANY_VALUE = frozenset(("eval", "exec", "globals", "locals", "vars", "__import__", "input"))
"""Built-in functions that may read any value."""
_ANY_NAME = frozenset((
    "getattr", "hasattr", "dir", "setattr", "attrgetter", "__dict__", "__getattribute__",
))  # fmt: skip
"""Functions and attributes by which code reads attributes whose names it computes."""
_TORCHS = ("aten::", "prim::", "prims::")
"""The names of torch's own operations begin like this."""
_READ_GLOBALS = frozenset(dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"))
_NOT_OF_A_CLASS = frozenset((
    "__dict__", "__weakref__", "__doc__", "__annotations__", "__module__", "__orig_bases__",
    "__parameters__", "__dataclass_fields__", "__dataclass_params__", "_abc_impl",
    "__abstractmethods__", "__firstlineno__", "__static_attributes__", "__slotnames__",
))  # fmt: skip

_HASHES = frozenset(("_original_object_hash",))
"""Attributes of transformers with Python's hash of an object, which differs in each process."""


@dataclass(frozen=True, slots=True)
class Digest:
    """What is known of some objects."""

    text: str
    unseen: str | None
    """What does not enter the text."""
    modules: frozenset[str]
    """The installed modules whose code was found."""


def digest_of(*given: object, shallow: Iterable[object] = ()) -> Digest:
    """A digest of all objects and what they refer to, each once. What ``shallow`` refers to counts
    only near it."""
    walk = _Walk()
    for item in given:
        walk.refer(item)
    for item in shallow:
        walk.refer(item, _SHALLOW)
    return walk.digest()


class _Walk:
    """Visits objects breadth first. A ``depth`` of None counts all; where a depth ends, objects
    count by their class."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._found: list[tuple[object, int | None]] = []  # keeps the objects, and so their ids
        self._numbers: dict[tuple[int, bool], int] = {}
        self._storages: dict[int, int] = {}
        self._kinds: dict[type, _Kind] = {}
        self._unseen: str | None = None
        self._modules: set[str] = set()

    def digest(self) -> Digest:
        for item, depth in self._found:  # grows meanwhile
            if len(self._found) > _MOST:
                self._miss(f"it refers to more than {_MOST:,} objects", None)
                break
            if depth is None or depth > 0:
                try:
                    self._look_at(item, None if depth is None else depth - 1)
                except Exception as error:  # noqa: BLE001 - of the user's own attributes
                    self._miss(f"{type(item).__qualname__} cannot be read: {error!r}", depth)
        text = "\0".join(self._said).encode(errors="replace")
        return Digest(_hashed(text), self._unseen, frozenset(self._modules))

    def say(self, text: str) -> None:
        self._said.append(text)

    def refer(self, item: Any, depth: int | None = None) -> None:
        kind = type(item)
        if kind in _PLAIN:
            self.say(f"{kind.__name__} {item!r}")
            return
        if depth is not None and _is_users(item):
            depth = None  # a function of the user in installed code replaces another one
        place = id(item), depth is None
        empty = ""
        if place not in self._numbers:
            self._numbers[place] = len(self._found)
            if depth != 0 and _is_container(item) and not item:
                depth, empty = 0, " empty"
            self._found.append((item, depth))
        self.say(f"{kind.__module__}.{kind.__qualname__} {self._numbers[place]}{empty}")

    def _miss(self, what: str, depth: int | None) -> None:
        if depth is None and self._unseen is None:
            self._unseen = what

    def _all(self, items: Iterable[object], depth: int | None) -> None:
        for item in items:
            self.refer(item, depth)

    def _look_at(self, item: Any, depth: int | None) -> None:
        kind = type(item)
        if kind in _CONTAINERS:
            self._object(item, depth)
        elif issubclass(kind, Tensor):
            self._tensor(item, depth)
        elif issubclass(kind, FunctionType):
            self._function(item, depth)
        elif issubclass(kind, CodeType):
            self._code(item, depth)
        elif issubclass(kind, type):
            self._class(item, depth)
        elif issubclass(kind, MethodType):
            self._all((item.__func__, item.__self__), depth)
        elif issubclass(kind, partial):
            self._all((item.func, item.args, item.keywords, vars(item)), depth)
        elif issubclass(kind, staticmethod | classmethod):
            self.refer(item.__wrapped__, depth)
        elif issubclass(kind, _lru_cache_wrapper):
            self.refer(item.__wrapped__, depth)
            if item.cache_info().currsize and _is_users(item.__wrapped__):
                self._miss(f"{item.__wrapped__.__qualname__} has cached results", depth)
        elif issubclass(kind, property):
            self._all((item.fget, item.fset), depth)
        elif issubclass(kind, cached_property):
            self.refer(item.func, depth)
        elif issubclass(kind, BuiltinFunctionType | MethodWrapperType):
            self.say(f"{getattr(item, '__module__', None)} {item.__qualname__}")
            if not isinstance(item.__self__, ModuleType | None):
                self.refer(item.__self__, depth)
        elif issubclass(kind, _DESCRIPTORS):
            self.say(f"{item.__objclass__.__qualname__}.{item.__name__}")
        elif issubclass(kind, _NAMED) or kind.__module__ == "typing":
            self.say(str(item))
        elif issubclass(kind, OpOverload | OpOverloadPacket):
            self._operation(item, depth)
        elif issubclass(kind, re.Pattern):
            self.say(f"{item.pattern!r} {item.flags}")  # its own text has an end
        elif issubclass(kind, logging.Logger):
            self.say(item.name)
        elif issubclass(kind, Thread) and depth is not None:
            self.say("")  # what it holds is of this process, as in the monitor of tqdm's bars
        elif kind is np.ndarray and not item.dtype.hasobject:
            self.say(f"{item.dtype} {item.shape} {item.strides}")
            self.say(_hashed(np.ascontiguousarray(item).tobytes()))
        elif issubclass(kind, ModuleType):
            self.say(item.__name__)
            self._miss(f"the module {item.__name__}, which an object refers to", depth)
        elif item is not os.environ:  # those that code names count with its file
            self._object(item, depth)

    def _operation(self, item: OpOverload | OpOverloadPacket, depth: int | None) -> None:
        self.say(str(item))
        name = item.name() if isinstance(item, OpOverload) else item._qualified_op_name
        if not name.startswith(_TORCHS) and ".py:" in torch._C._dispatch_dump(name):
            self._miss(f"the operation {name}, which Python code defines", depth)

    def _tensor(self, item: Tensor, depth: int | None) -> None:
        self._all((item.dtype, item.layout, item.device, *item.shape, item.requires_grad), depth)
        self._all(map(bool, (item._backward_hooks, item._post_accumulate_grad_hooks)), depth)
        self.refer(type(item), depth)
        self._all(vars(item).items(), depth)
        if item.layout is not torch.strided:
            self._miss(f"a tensor of layout {item.layout}", depth)
        elif not item.is_meta and type(item) in (Tensor, nn.Parameter):
            self.say(f"{item.stride()} {item.storage_offset()}")
            memory = item.untyped_storage().data_ptr()
            self.say(str(self._storages.setdefault(memory, len(self._storages))))
            if type(item) is Tensor:  # code may hold it as a constant
                content = item.detach().cpu().contiguous().reshape(-1)
                plain = content.resolve_conj().resolve_neg().view(torch.uint8)
                self.say(_hashed(plain.numpy().data))
        elif not item.is_meta and not isinstance(item, nn.Parameter):
            self._miss(f"a tensor of the class {type(item).__qualname__}", depth)

    def _object(self, item: Any, depth: int | None) -> None:
        kind = type(item)
        self.refer(kind, depth)
        if issubclass(kind, int | float | str | bytes):
            self.say(_own(item, int, float, str, bytes).__repr__(item))
        elif issubclass(kind, dict | MappingProxyType):
            pairs = _own(item, OrderedDict, dict, MappingProxyType).items(item)
            if not self._plain([part for pair in pairs for part in pair], pairs, depth):
                pairs = pairs if depth is None else sorted(pairs, key=lambda pair: _word(pair[0]))
                self._all((part for pair in pairs for part in pair), depth)
        elif issubclass(kind, set | frozenset):
            self._set(item, depth)
        elif issubclass(kind, list | tuple | deque):
            items = list(_own(item, list, tuple, deque).__iter__(item))
            if not self._plain(items, items, depth):
                self._all(items if depth is None else sorted(items, key=_word), depth)
        if _is_container(item):
            return
        self.say("")
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _Kind.of(kind)
        self._all(_attributes(item, known.slots), depth)
        if known.hides:
            self._miss(f"an object of the class {kind.__module__}.{kind.__qualname__}", depth)

    def _plain(self, parts: Iterable[object], items: Iterable[object], depth: int | None) -> bool:
        """Whether all ``parts`` of the ``items`` of an object are plain. Then the items count."""
        if not _PLAIN.issuperset(map(type, parts)):
            return False
        said = map(repr, items)
        self.say(f"plain {list(said if depth is None else sorted(said))}")
        return True

    def _set(self, item: set[Any] | frozenset[Any], depth: int | None) -> None:
        """Its members sorted by their text: their order depends on the process."""
        if all(type(x) in _PLAIN or isinstance(x, Enum | type) for x in item):
            self._all(sorted(map(repr, item)), depth)
        else:
            self._all(sorted(f"{type(x).__module__}.{type(x).__qualname__}" for x in item), depth)
            self._miss("a set of objects", depth)

    def _class(self, kind: type, depth: int | None) -> None:
        self.say(f"{kind.__module__}.{kind.__qualname__}")
        if kind.__module__ == "builtins":
            return
        if is_of_installed(kind):
            self._modules.add(kind.__module__)
            depth = _SHALLOW - 1 if depth is None else depth
        parts = vars(kind).items()
        for name, part in parts if depth is None else sorted(parts, key=itemgetter(0)):
            if name not in _NOT_OF_A_CLASS:
                self._all((name, part), depth)
        self._all((type(kind), *kind.__bases__), depth)

    def _function(self, function: FunctionType, depth: int | None) -> None:
        self._all((function.__defaults__, function.__kwdefaults__), depth)
        for cell in function.__closure__ or ():
            try:
                self.refer(cell.cell_contents, depth)
            except ValueError:  # not assigned yet
                self.say("empty")
        code = function.__code__
        if _installed(function):
            self._modules.add(str(function.__globals__.get("__name__")))
            self.say(f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}")
            return
        self.refer(vars(function), depth)
        self.refer(code, depth)
        read = _Read.by(code)
        for name in sorted(read.values):
            if name in function.__globals__:
                value = function.__globals__[name]
            else:
                value = vars(builtins).get(name, NotImplemented)
                if name in _ANY_VALUE:
                    self._miss(f"{function.__qualname__}: {name} may read any value", depth)
            self.say(name)
            self._read_value(value, read, function, depth, set())
        for name in sorted(read.modules):
            self.say(name)
            module = _module(name, function)
            self._read_value(module, read, function, depth, set())

    def _read_value(
        self,
        value: Any,
        read: _Read,
        function: FunctionType,
        depth: int | None,
        seen: set[int],
    ) -> None:
        """Count a value that ``function`` reads, of a module those attributes that it names."""
        module = isinstance(value, ModuleType)
        code = isinstance(value, type | FunctionType | MethodType | BuiltinFunctionType)
        place = value.__name__ if module else getattr(value, "__module__", None) if code else None
        if place in _IMPURE:
            what = f"{function.__qualname__} uses {place}"
            self._miss(f"{what}, whose results may differ each time", depth)
        if not module:
            self.refer(value, depth)
        elif id(value) not in seen:
            seen.add(id(value))
            attributes = vars(value)
            names = read.names if is_of_installed(value) or not read.any_name else {*attributes}
            for name in sorted(names & attributes.keys()):
                self.say(name)
                self._read_value(attributes[name], read, function, depth, seen)

    def _code(self, code: CodeType, depth: int | None) -> None:
        self._all((code.co_code, code.co_names, code.co_consts, code.co_varnames), depth)
        self._all((code.co_freevars, code.co_cellvars, code.co_exceptiontable), depth)
        self._all((code.co_argcount, code.co_kwonlyargcount, code.co_flags), depth)


@dataclass(frozen=True, slots=True)
class _Read:
    """What the code of a function names."""

    values: frozenset[str]
    """Global values."""
    modules: frozenset[str]
    """Modules that it imports when it runs."""
    names: frozenset[str]
    """Everything that may be the name of an attribute."""

    @property
    def any_name(self) -> bool:
        """Whether it may compute the name of an attribute."""
        return not self.names.isdisjoint(_ANY_NAME)

    @staticmethod
    def by(code: CodeType) -> _Read:
        values: set[str] = set()
        modules: set[str] = set()
        names: set[str] = set()
        codes = [code]
        for each in codes:  # grows meanwhile
            names.update(each.co_names, _texts(each.co_consts))
            codes += [x for x in each.co_consts if isinstance(x, CodeType)]
            if _READ_GLOBALS.isdisjoint(each.co_code[::2]):
                continue
            for step in dis.get_instructions(each):
                if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    values.add(step.argval)
                elif step.opname == "IMPORT_NAME":
                    modules.add(step.argval)
        return _Read(frozenset(values), frozenset(modules), frozenset(names))


def _hashed(content: Buffer) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _texts(constants: Iterable[object]) -> Iterable[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _texts(constant)


def _module(name: str, function: FunctionType) -> ModuleType | None:
    """A module that a function imports, if something has imported it already."""
    package = function.__globals__.get("__package__")
    return sys.modules.get(name) or sys.modules.get(f"{package}.{name}")


def _is_users(item: object) -> bool:
    """Whether the user has written the function that an object calls."""
    while isinstance(item, partial | MethodType):
        item = item.func if isinstance(item, partial) else item.__func__
    return isinstance(item, FunctionType) and is_users(item)


def _installed(function: FunctionType) -> bool:
    return is_installed(function.__code__.co_filename)


def _word(item: object) -> str:
    """Sorts what installed code holds: it may be in the order of a set, which each process has its
    own of."""
    return repr(item) if type(item) in _PLAIN else type(item).__qualname__


def _own(item: object, *kinds: Any) -> Any:
    """The first of ``kinds`` that the object is of: subclasses may compute their items."""
    return next(kind for kind in kinds if issubclass(type(item), kind))


def _is_container(item: Any) -> bool:
    """Whether an object is nothing but its items."""
    kind = type(item)
    return kind in _CONTAINERS and not (kind is OrderedDict and vars(item))


def _attributes(item: Any, slots: Iterable[str]) -> Iterator[Any]:
    """The attributes of an object, by name."""
    for pair in getattr(item, "__dict__", {}).items():
        if pair[0] not in _HASHES:
            yield from pair
    for name in slots:
        yield from (name, getattr(item, name, None))


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class, as far as all of its objects are concerned."""

    slots: tuple[str, ...]
    hides: bool
    """Whether C code may hold anything in its objects."""

    @staticmethod
    def of(kind: type) -> _Kind:
        slots = tuple(name for base in kind.__mro__ for name in _slots(base))
        return _Kind(slots, any(base not in _READ and _hides(base) for base in kind.__mro__))


def _slots(kind: type) -> tuple[str, ...]:
    slots: Any = vars(kind).get("__slots__", ())
    if issubclass(kind, msgspec.Struct):
        slots = getattr(kind, "__struct_fields__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _hides(kind: type) -> bool:
    """Whether a class is one of C code, whose objects may hold anything."""
    own = {"__dict__", "__weakref__", *_slots(kind)}
    return any(
        getattr(part, "__objclass__", None) is kind
        for name, part in vars(kind).items()
        if name not in own
    )
