"""The arguments and results of a call, as far as its trace can depend on them.

Arguments enter, or results; a description leaves that is equal for calls that read equal arguments,
or None if there may be more to read than it can say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from piper.base.modes import autocast_kinds
from piper.capture.intercept.hf_cache import is_cache
from piper.ir.tensors import TensorSpec

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OF_TENSORS = {
    *vars(FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), torch.device("cpu"))),
    *("_is_param", "_is_buffer", "persistent"),
}
"""The attributes that torch gives to tensors."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A dataclass as a node of a tree."""

    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]

    def closed(self) -> Any:
        made: Any = object.__new__(self.kind)
        for name, value in zip(self.names, self.values, strict=True):
            object.__setattr__(made, name, value)
        return made


pytree.register_pytree_node(
    _Opened,
    lambda x: (list(x.values), (x.kind, x.names)),
    lambda values, of: _Opened(of[0], of[1], tuple(values)).closed(),
)


def flat(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of ``tree``, among them key-value caches, and its form."""
    return flat_results(tree, is_cache)


def flat_results(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of ``tree``, also those in dataclasses, and its form."""
    leaves, form = pytree.tree_flatten(tree, is_leaf=is_leaf)
    opened = [_opened(x) for x in leaves]
    if all(x is y for x, y in zip(leaves, opened, strict=True)):
        return leaves, form
    return flat_results(form.unflatten(opened), is_leaf)


def _opened(x: Any) -> Any:
    """A dataclass that holds tensors, as a node, if its fields are all that it holds."""
    if isinstance(x, type) or not is_dataclass(x) or type(x).__new__ is not object.__new__:
        return x
    state = object.__getstate__(x)
    parts = state if isinstance(state, tuple) else (state,)  # attributes, and those in slots
    held = {name: value for part in parts if part for name, value in part.items()}
    names = tuple(field.name for field in fields(x))
    if held.keys() != set(names) or not any(isinstance(value, Tensor) for value in held.values()):
        return x
    return _Opened(type(x), names, tuple(held[name] for name in names))


def tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in flat(tree)[0] if isinstance(x, Tensor)]


def signature(arguments: Arguments) -> Any:
    """All that a forward can read of its arguments while it is traced, and the modes; None if there
    may be more. A key-value cache says nothing: ``caches.py`` refuses to read it."""
    leaves, form = flat(arguments)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if not tensors or autocast_kinds() or sum(map(is_cache, leaves)) > 1:
        return None
    memory = [_memory(x) for x in tensors]
    objects = [id(x) for x in tensors]
    described: list[Any] = []
    for x in leaves:
        if _is_plain(x) and (x.dim() or x.dtype is not torch.bool):
            about = TensorSpec.of(x), x.storage_offset(), x.device, x.requires_grad
            described.append((*about, memory.index(_memory(x)), objects.index(id(x))))
        elif type(x) in _PLAIN:
            described.append((type(x), repr(x)))
        elif is_cache(x):
            described.append(type(x))
        else:
            return None
    return described, form, torch.is_grad_enabled(), torch.get_default_dtype()


def plain_results(made: list[Any], given: list[Tensor], state: list[Tensor]) -> bool:
    """Whether the results are tensors with memory of their own, as an operation makes them, and
    plain values."""
    tensors = [x for x in made if isinstance(x, Tensor)]
    kinds = all(_is_plain(x) or type(x) in _PLAIN for x in made)
    known = {_memory(x) for x in (*given, *state)}
    own = len({_memory(x) for x in tensors} - known) == len(tensors)
    grad = any(x.requires_grad for x in given) and torch.is_grad_enabled()
    expected = all(x.requires_grad == (grad and differentiable(x.dtype)) for x in tensors)
    return kinds and own and bool(tensors) and expected


def differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_plain(x: Any) -> bool:
    """Whether ``x`` is a tensor of which its spec says all: no constant, and no attribute from the
    model's code."""
    return type(x) is FakeTensor and x.constant is None and not own_attributes(x)


def own_attributes(x: Tensor) -> dict[str, Any]:
    """The attributes of a tensor that code gave it."""
    return {name: value for name, value in vars(x).items() if name not in _OF_TENSORS}


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
