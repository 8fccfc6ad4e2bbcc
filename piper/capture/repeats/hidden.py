"""Of equal modules, all but the first and the last hide their tensors and submodules while the
model is traced: torch finds nothing to do for them.

A model that looks for what is hidden (``self.parameters()`` in its forward) cannot be traced like
this: each such look is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

_DICTS = ("_parameters", "_buffers", "_modules")


class _Hidden(dict[str, Any]):
    """An empty dict in place of ``content``."""

    def __init__(self, content: dict[str, Any], looked: Callable[[], None]) -> None:
        super().__init__()
        self.content = content
        self.looked = looked


def _reporting(name: str) -> Callable[..., Any]:
    def method(self: _Hidden, *args: Any, **kwargs: Any) -> Any:
        if not args or args[0] in self.content:  # an attribute that it never had is no secret
            self.looked()
        return getattr(dict, name)(self, *args, **kwargs)

    return method


for _name in ("__getitem__", "__contains__", "__iter__", "__len__", "__setitem__", "__delitem__"):
    setattr(_Hidden, _name, _reporting(_name))
for _name in ("get", "keys", "values", "items", "copy", "pop", "popitem", "setdefault"):
    setattr(_Hidden, _name, _reporting(_name))


def content_of(held: dict[str, Any]) -> dict[str, Any]:
    """What a module's dict of tensors or submodules holds, also if it is hidden."""
    return held.content if isinstance(held, _Hidden) else held


def submodules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """``module`` and its submodules with their paths, also if they are hidden."""
    yield path, module
    for name, child in content_of(module._modules).items():
        if child is not None:
            yield from submodules(child, f"{path}.{name}" if path else name)


def is_hidden(module: nn.Module) -> bool:
    return isinstance(module._modules, _Hidden)


def hide(module: nn.Module, looked: Callable[[], None], contexts: ExitStack) -> None:
    """Hide what ``module`` and its submodules hold, until ``contexts`` end."""
    for _, owner in list(submodules(module)):
        for name in _DICTS:
            held = vars(owner)[name]
            if not isinstance(held, _Hidden):  # not yet, as the same submodule at another path
                vars(owner)[name] = _Hidden(held, looked)
                contexts.callback(vars(owner).__setitem__, name, held)
