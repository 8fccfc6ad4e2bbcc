"""Values for non-persistent buffers on the meta device, such as rotary embedding frequencies. Their
own modules compute them.

A module computes them in ``reset_parameters``, as torch FSDP requires; a transformers model in
``_init_weights``. Piper calls these on a copy whose parameters stay on the meta device, so no
parameter is allocated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.state.weights.source import seed_for


def computed_buffer(root: nn.Module, path: str, name: str, seed: int) -> Tensor:
    """A value for the buffer ``path`` of ``root``, which is on the meta device. Error messages and
    the random seed use ``name``."""
    cause: Exception | None = None
    for prefix, module in _around(root, path):
        own = path.removeprefix(prefix)
        for fill in _ways(root, path, module):
            made = _empty_copy(module)
            before = made.get_buffer(own)
            version = before._version
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    torch.manual_seed(seed_for(name, seed))
                    fill(made)
            except Exception as error:  # noqa: BLE001 - fill may not handle this module
                cause = error
                continue
            after = made.get_buffer(own)
            if not after.is_meta and (after is not before or after._version != version):
                return after.detach()
    raise PiperError(
        f"{name} is a buffer on the meta device that no state dict has, and no reset_parameters of "
        "its module computes it: give piper.weights(folder, init=...), a function (name, tensor, "
        "generator) that fills it, or make the buffers of the model on the CPU"
    ) from cause


def _around(root: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The buffer's module and its parents, innermost first, each with the prefix of its names."""
    parts = path.split(".")[:-1]
    for depth in range(len(parts), -1, -1):
        prefix = ".".join(parts[:depth])
        yield prefix + "." if prefix else "", root.get_submodule(prefix)


def _ways(root: nn.Module, path: str, module: nn.Module) -> Iterator[Callable[[Any], object]]:
    """Functions that may fill the buffers of a copy of ``module``."""
    for _, outer in _around(root, path):
        if callable(fill := getattr(outer, "_init_weights", None)):
            yield fill
            break
    if callable(getattr(module, "reset_parameters", None)):
        yield lambda made: made.reset_parameters()


def _empty_copy(module: nn.Module) -> Any:
    """A copy with its parameters on the meta device and uninitialised buffers on the CPU."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        kept = parameter.detach().to("meta")
        memo[id(parameter)] = nn.Parameter(kept, parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="cpu")
    return copy.deepcopy(module, memo)
