"""What equal modules read beside their own attributes and their arguments: objects that they share,
such as a configuration, and the globals and closures of their code. If any of it changes while the
model runs, each call may compute something else; so it may if a module finds itself among them."""

from __future__ import annotations

import functools
import logging
import random
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

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
        inside: list[object] = [type(value)]
        if isinstance(value, dict):
            inside += [self.of(x) for pair in value.items() for x in pair]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            inside += [self.of(x) for x in value]
        elif isinstance(value, functools.partial):
            inside += [self.of(x) for x in (value.func, value.args, value.keywords)]
        inside += [self.of(x) for x in getattr(value, "__dict__", {}).values()]
        slots = getattr(type(value), "__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        return [*inside, *(self.of(getattr(value, name, None)) for name in names)]


def _read_by(function: types.FunctionType) -> Iterator[Any]:
    """The present values of the globals, closure and defaults of a function."""
    space = function.__globals__
    yield from (space[name] for name in function.__code__.co_names if name in space)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            yield None
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _functions_of(kinds: set[type]) -> list[types.FunctionType]:
    """The methods of some classes, and the functions that they name. Torch's own keep nothing from
    one call to the next that changes a result."""
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    waiting: list[Any] = [x for base in bases for x in vars(base).values()]
    found: dict[types.CodeType, types.FunctionType] = {}
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or function.__code__ in found:
            continue
        if (function.__module__ or "").partition(".")[0] not in ("torch", "piper", "logging"):
            found[function.__code__] = function
            waiting += _read_by(function)
    return list(found.values())
