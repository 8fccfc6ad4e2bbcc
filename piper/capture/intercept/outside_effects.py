"""Side effects of a forward that tracing cannot follow: draws from random generators outside the
graph, and changed attributes of modules.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from piper.base.errors import CaptureError
from piper.capture.blame import user_name


def generators_now() -> dict[str, object]:
    """The state of the generators that tracing cannot follow."""
    numpy = sys.modules.get("numpy")
    with _disable_current_modes():  # else tracing would record the state as a constant
        torch_state = torch.get_rng_state().numpy().tobytes()
    states: dict[str, object] = {
        "Python's random": random.getstate(),
        "torch's generator for the CPU outside of tracing": torch_state,
    }
    if numpy is not None:
        states["numpy.random"] = str(numpy.random.get_state())
    return states


def attributes_of(module: nn.Module) -> dict[tuple[str, str], Any]:
    """The buffers, tensor attributes and plain numbers (also in lists and dicts) of all modules and
    their classes, by module path and name."""
    attributes: dict[tuple[str, str], Any] = {}
    for path, owner in module.named_modules():
        own = {k: v for k, v in vars(owner).items() if k not in _HOOKS}
        own = {**attributes_of_class(type(owner)), **own}
        plain = {k: v for k, v in own.items() if isinstance(v, Tensor)}
        for name, value in {**plain, **numbers_of(own), **owner._buffers}.items():
            if value is not None:
                attributes[path, name] = value
    return attributes


_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
"""The attributes that hold a module's hooks; they are not state of the model."""


def numbers_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The plain numbers among ``attributes``, and copies of its lists and dicts of numbers or
    strings."""
    numbers = {k: v for k, v in attributes.items() if isinstance(v, int | float)}
    return numbers | {k: copy.copy(v) for k, v in attributes.items() if _is_of_numbers(v)}


def attributes_of_class(kind: type) -> dict[str, Any]:
    """The class attributes of ``kind`` and its base classes, except torch's."""
    own = [k for k in reversed(kind.__mro__) if k.__module__.partition(".")[0] != "torch"]
    return {k: v for base in own for k, v in vars(base).items() if not k.startswith("__")}


def _is_of_numbers(x: object) -> bool:
    if not isinstance(x, list | dict):
        return False
    return all(isinstance(v, int | float | str) for v in (x.values() if isinstance(x, dict) else x))


def assigned(
    module: nn.Module, before: dict[tuple[str, str], Any], frozen: list[str]
) -> dict[str, Tensor]:
    """The new tensors of buffers that the forward reassigned, by path; the old buffers are put
    back. Any other reassigned tensor is refused. A changed number may be a mere counter, so its
    name is added to ``frozen`` instead."""
    reassigned: dict[str, Tensor] = {}
    for (path, name), old in before.items():
        owner = module.get_submodule(path)
        new = owner._buffers[name] if name in owner._buffers else getattr(owner, name, None)
        if new is old or (not isinstance(new, Tensor) and new == old):
            continue
        full = f"{path}.{name}"
        if not isinstance(old, Tensor):
            frozen.append(user_name(full, {}))
            continue
        if name not in owner._buffers or not isinstance(new, Tensor):
            raise CaptureError(
                f"the attribute {user_name(full, {})!r} changes from one call to the next, and "
                "capture would freeze it: make it a buffer (register_buffer)"
            )
        reassigned[full] = new
        owner._buffers[name] = old
    return reassigned
