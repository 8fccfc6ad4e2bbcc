"""What equal modules read beside their own attributes and their arguments: objects that they share,
such as a configuration, and the globals and closures of their code. If any of it changes while the
model runs, each call may compute something else; so it may if a module finds itself among them."""

from __future__ import annotations

import dis
import functools
import logging
import random
import types
import weakref
from array import array
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from piper.capture.repeats.hidden import submodules

_MOST = 20_000
"""Values that are looked at; more of them are taken for changed."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))
_FIXED = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.dtype, torch.device),
    *(Tensor, nn.Module, logging.Logger),
)
"""Compared by identity alone."""
_WITHOUT_STATE = ("torch", "piper", "logging", "numpy")
"""Packages whose functions keep nothing from one call to the next that changes a result."""
_UNKNOWN = (Iterator, random.Random, weakref.ReferenceType, weakref.ProxyTypes)
"""What they lead to cannot be seen."""


class Surroundings:
    """Those of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        owners = [owner for _, owner in submodules(module)]
        self._holders = [vars(owner) for owner in owners]
        self._functions = _functions_of({type(owner) for owner in owners})

    def now(self) -> object:
        """All of it, as a value to compare with a later one."""
        walk = _Walk()
        shared = [x for own in self._holders for name, x in own.items() if name not in _OF_MODULES]
        known = [walk.of(x) for x in (shared, [list(_read_by(f)) for f in self._functions])]
        inside = (x for root in walk.modules for _, x in submodules(root))
        return object() if any(x is self._module for x in inside) else known


class _Walk:
    """Nested data as plain values, with a number for what was met before."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, object]] = {}
        self.modules: list[nn.Module] = []

    def of(self, value: object) -> object:
        if isinstance(value, _PLAIN):
            return type(value), repr(value)
        if isinstance(value, nn.Module):
            self.modules.append(value)
        if isinstance(value, _FIXED):
            return id(value)
        if id(value) in self._met:
            return self._met[id(value)][0]
        self._met[id(value)] = len(self._met), value  # held, so that its id stays its own
        if len(self._met) > _MOST or isinstance(value, _UNKNOWN):
            return object()  # equal to nothing
        if isinstance(value, ContextVar):
            return self.of(value.get(None))
        inside: list[object] = [type(value)]
        if isinstance(value, np.ndarray | array):
            inside.append(hash(value.tobytes()))
        if isinstance(value, dict):
            inside += [self.of(x) for pair in value.items() for x in pair]
        elif isinstance(value, list | tuple | set | frozenset | deque | bytearray):
            inside += [self.of(x) for x in value]
        elif isinstance(value, functools.partial):
            inside += [self.of(x) for x in (value.func, value.args, value.keywords)]
        inside += [self.of(x) for x in getattr(value, "__dict__", {}).values()]
        slots = getattr(type(value), "__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        return [*inside, *(self.of(getattr(value, name, None)) for name in names)]


def _read_by(function: types.FunctionType) -> Iterator[Any]:
    """The present values of the globals, closure and defaults of a function, and of the attributes
    of modules and classes that it names."""
    space, names = function.__globals__, function.__code__.co_names
    for value in (space[name] for name in names if name in space):
        yield value
        if isinstance(value, types.ModuleType | type):
            yield from (vars(value)[name] for name in names if name in vars(value))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            yield None
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def names_beside_type(module: nn.Module) -> frozenset[str]:
    """The names in those functions of a module that ask for the type of something."""
    functions = _functions_of({type(owner) for _, owner in submodules(module)})
    codes = [x.__code__ for x in functions if x.__name__ != "__init__"]
    for code in codes:  # grows meanwhile
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    asking = [code for code in codes if "type" in code.co_names and _loads(code, "type")]
    return frozenset(name for code in asking for name in code.co_names)


def _loads(code: types.CodeType, name: str) -> bool:
    steps = dis.get_instructions(code)
    return any(x.opname == "LOAD_GLOBAL" and x.argval == name for x in steps)


def _functions_of(kinds: set[type]) -> list[types.FunctionType]:
    """The methods of some classes, and the functions that they name."""
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    waiting: list[Any] = [x for base in bases for x in vars(base).values()]
    found: dict[types.CodeType, types.FunctionType] = {}
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or function.__code__ in found:
            continue
        if (function.__module__ or "").partition(".")[0] not in _WITHOUT_STATE:
            found[function.__code__] = function
            waiting += _read_by(function)
    return list(found.values())
