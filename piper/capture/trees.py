"""The structure of a batch as JSON: tuples, lists and dicts; no class is ever named.

null                                  a leaf
["tuple", [...]]  ["list", [...]]     its items
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
    """``spec``, the structure of a batch, as JSON data."""
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
    """Read the output of ``tree_to_json``: a tuple of positional inputs, a dict of keyword inputs,
    and a tuple of targets."""
    batch = _read(data)
    match batch:
        case (tuple(), dict(), tuple()) if all(isinstance(key, str) for key in batch[1]):
            return pytree.tree_structure(batch)
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
    made_dict = empty()
    with within("keys"):
        for key in rows(keys):
            if not isinstance(key, str | int | float | None) or key in made_dict:
                raise MalformedError(f"{shown(key)} is not a valid key, or appears twice")
            made_dict[key] = None
    for key, item in zip(keys, row(items, len(keys)), strict=True):
        made_dict[key] = _read(item, depth + 1)
    return made_dict


_DICTS: Mapping[str, Callable[[], dict[Any, Any]]] = {
    "dict": dict,
    "ordered": OrderedDict,
    **{
        f"default {name}": lambda factory=factory: defaultdict(factory)  # type: ignore[misc]
        for name, factory in _FACTORIES.items()
    },
}
