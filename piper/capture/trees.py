"""The structure of a batch as JSON: torch's own form of a pytree, without the parts that import.

Tuples, lists and dicts only. Torch's form may also name enums and functions, whose modules reading
would import: these are refused before torch sees them.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from torch.utils import _pytree as pytree

from piper.base.codec import decode
from piper.base.errors import PiperError
from piper.base.reading import MalformedError, shown, within

_SEQUENCES = ("builtins.tuple", "builtins.list")


class _Factory(msgspec.Struct, forbid_unknown_fields=True):
    """The context of a defaultdict."""

    default_factory_module: Literal["builtins"]
    default_factory_name: Literal["list", "dict", "tuple", "set", "int", "float", "str", "bool"]
    dict_context: list[str | int | float | None]


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    """A leaf, whose type is null, or a container. The context of a dict is its keys, as JSON."""

    type: (
        Literal[
            "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict",
            "collections.defaultdict",
        ]
        | None
    )  # fmt: skip
    context: str | _Factory | None
    children_spec: list[_Node]


def tree_to_json(spec: pytree.TreeSpec) -> Any:
    """``spec``, the structure of a batch, as JSON data."""
    try:
        data = json.loads(pytree.treespec_dumps(spec))
        _check(decode(tuple[Literal[1], _Node], data)[1])
    except (NotImplementedError, TypeError, AttributeError, MalformedError) as error:
        raise PiperError(
            f"the structure of the batch cannot be saved ({error}): give tuples, lists, and dicts "
            "whose keys are strings or numbers; a defaultdict may make lists, dicts or numbers"
        ) from None
    return data


def tree_from_json(data: Any) -> pytree.TreeSpec:
    """Read the output of ``tree_to_json``: a tuple of positional inputs, a dict of keyword inputs,
    and a tuple of targets."""
    _, root = decode(tuple[Literal[1], _Node], data)
    _check(root)
    spec = pytree.treespec_loads(json.dumps(data))
    batch = spec.unflatten([None] * spec.num_leaves)
    match batch:
        case (tuple(), dict(), tuple()) if all(isinstance(key, str) for key in batch[1]):
            return spec
        case _:
            raise MalformedError("a batch is positional inputs, keyword inputs and targets")


def _check(node: _Node) -> None:
    """Refuse a context that is not of its type, and keys that are not those of the children."""
    if node.type is None or node.type in _SEQUENCES:
        fits = node.context == (None if node.type is None else "null")
        if not fits or (node.type is None and node.children_spec):
            raise MalformedError(f"{shown(node.type)} has the context {shown(node.context)}")
    else:
        keys = _keys(node)
        if len(set(keys)) != len(keys) or len(keys) != len(node.children_spec):
            raise MalformedError(f"{shown(keys)} are not the keys of a {node.type}")
    for place, child in enumerate(node.children_spec):
        with within(place):
            _check(child)


def _keys(node: _Node) -> list[Any]:
    if node.type == "collections.defaultdict" and isinstance(node.context, _Factory):
        return node.context.dict_context
    try:
        keys = json.loads(node.context) if isinstance(node.context, str) else None
    except ValueError:
        keys = None
    if node.type == "collections.defaultdict" or type(keys) is not list:
        raise MalformedError(f"{shown(node.context)} is not the context of a {node.type}")
    if not all(isinstance(key, str | int | float | None) for key in keys):
        raise MalformedError(f"{shown(keys)} are not keys: these are strings or numbers")
    return keys
