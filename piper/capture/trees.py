"""How a batch is nested, as plain data: tuples, lists and dicts, and nothing that names a class.

null                                  a leaf
["tuple", [...]]  ["list", [...]]     what is in it
["dict", keys, [...]]                 also "ordered", and "default list" for a defaultdict
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils import _pytree as pytree

from piper.base.errors import PiperError
from piper.base.reading import MalformedError, row, rows, shown, within, wrong

_FACTORIES: Mapping[str, type | None] = {
    "none": None,
    **{kind.__name__: kind for kind in (list, dict, tuple, set, int, float, str, bool)},
}
_DEPTH = 32


def tree_to_json(spec: pytree.TreeSpec) -> Any:
    """``spec``, the structure of a batch."""
    count = spec.num_leaves
    return _written(spec.unflatten([_Leaf()] * count))


class _Leaf:
    pass


def _written(item: Any) -> Any:
    kind = type(item)
    if kind is _Leaf:
        return None
    if kind in (tuple, list):
        return [kind.__name__, [_written(x) for x in item]]
    if kind in (dict, OrderedDict, defaultdict):
        keys = list(item)
        if all(isinstance(key, str | int | float | None) for key in keys):
            return [_kind_of(item), keys, [_written(x) for x in item.values()]]
    raise PiperError(
        f"a batch with a {kind.__name__} in it cannot be saved: give tuples, lists, and dicts "
        "whose keys are strings or numbers"
    )


def _kind_of(item: dict[Any, Any]) -> str:
    if not isinstance(item, defaultdict):
        return "ordered" if isinstance(item, OrderedDict) else "dict"
    for name, factory in _FACTORIES.items():
        if item.default_factory is factory:
            return f"default {name}"
    raise PiperError(
        "a batch with a defaultdict in it cannot be saved unless it makes lists, dicts or numbers: "
        "give a dict"
    )


def tree_from_json(data: Any) -> pytree.TreeSpec:
    """What ``tree_to_json`` wrote: a tuple of positional inputs, a dict of keyword inputs, and a
    tuple of targets."""
    found = _read(data)
    match found:
        case (tuple(), dict(), tuple()) if all(isinstance(key, str) for key in found[1]):
            return pytree.tree_structure(found)
        case _:
            raise MalformedError("a batch is positional inputs, keyword inputs and targets")


def _read(data: Any, depth: int = 0) -> Any:
    if data is None:
        return _Leaf()
    if depth > _DEPTH:
        raise MalformedError("this is nested too deeply")
    if type(data) is not list or not data:
        raise wrong(data, "a tuple, a list or a dict")
    if data[0] in ("tuple", "list"):
        _, items = row(data, 2)
        made = [_read(x, depth + 1) for x in rows(items)]
        return tuple(made) if data[0] == "tuple" else made
    kind, keys, items = row(data, 3)
    empty = _DICTS.get(kind) if type(kind) is str else None
    if empty is None:
        raise wrong(kind, f"one of tuple, list, {', '.join(_DICTS)}")
    found = empty()
    with within("keys"):
        for key in rows(keys):
            if not isinstance(key, str | int | float | None) or key in found:
                raise MalformedError(f"{shown(key)} is no key, or is there twice")
            found[key] = None
    for key, item in zip(keys, row(items, len(keys)), strict=True):
        found[key] = _read(item, depth + 1)
    return found


_DICTS: Mapping[str, Callable[[], dict[Any, Any]]] = {
    "dict": dict,
    "ordered": OrderedDict,
    **{
        f"default {name}": lambda factory=factory: defaultdict(factory)  # type: ignore[misc]
        for name, factory in _FACTORIES.items()
    },
}
