"""What a forward draws and changes outside of the graph that is traced: the generators of random
numbers that tracing cannot follow, and attributes of modules.
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
    with _disable_current_modes():  # else the state would be traced, and kept with the program
        torch_state = torch.get_rng_state().numpy().tobytes()
    found: dict[str, object] = {
        "Python's random": random.getstate(),
        "torch's generator for the CPU outside of tracing": torch_state,
    }
    if numpy is not None:
        found["numpy.random"] = str(numpy.random.get_state())
    return found


def attributes_of(module: nn.Module) -> dict[tuple[str, str], Any]:
    """The buffers, and the plain numbers (in lists and dicts, too) and tensors, of all modules and
    of their classes."""
    found: dict[tuple[str, str], Any] = {}
    for path, owner in module.named_modules():
        own = {k: v for k, v in vars(owner).items() if k not in _HOOKS}
        own = {**attributes_of_class(type(owner)), **own}
        plain = {k: v for k, v in own.items() if isinstance(v, Tensor)}
        for name, value in {**plain, **numbers_of(own), **owner._buffers}.items():
            if value is not None:
                found[path, name] = value
    return found


_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
"""Where torch keeps what is called with a module: no numbers of the model's."""


def numbers_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The plain numbers among ``attributes``, and copies of the lists and dicts of such."""
    numbers = {k: v for k, v in attributes.items() if isinstance(v, int | float)}
    return numbers | {k: copy.copy(v) for k, v in attributes.items() if _is_of_numbers(v)}


def attributes_of_class(kind: type) -> dict[str, Any]:
    """What a class says of all its instances; nothing of torch's own."""
    own = [k for k in reversed(kind.__mro__) if k.__module__.partition(".")[0] != "torch"]
    return {k: v for one in own for k, v in vars(one).items() if not k.startswith("__")}


def _is_of_numbers(x: object) -> bool:
    if not isinstance(x, list | dict):
        return False
    return all(isinstance(v, int | float | str) for v in (x.values() if isinstance(x, dict) else x))


def assigned(
    module: nn.Module, before: dict[tuple[str, str], Any], frozen: list[str]
) -> dict[str, Tensor]:
    """The buffers that were assigned anew, which are put back. Another tensor is refused; a number
    may only count, so its name is added to ``frozen``."""
    found: dict[str, Tensor] = {}
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
        found[full] = new
        owner._buffers[name] = old
    return found
