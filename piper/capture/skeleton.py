"""A copy of the model that has its structure and code but no data, to be traced in its place."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedParameter

from piper.errors import CaptureError


def fake_like(x: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """A fake tensor of the shape, strides and dtype of ``x``, on ``device``."""
    with mode:
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    assert isinstance(fake, FakeTensor)
    return fake


def skeleton_of(
    model: nn.Module, mode: FakeTensorMode, device: torch.device, called: str
) -> tuple[nn.Module, dict[str, str]]:
    """A copy of ``model`` with fake tensors, and each tensor's path to its first path (ties).

    ``called`` is what errors call the model.
    """
    memo: dict[int, Any] = {}
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            raise CaptureError(
                f"{path} is not initialized: run the lazy {called} once on a batch "
                "before it is captured"
            )
        names[path] = first.setdefault(id(parameter), path)
        fake = nn.Parameter(
            fake_like(parameter, mode, device), requires_grad=parameter.requires_grad
        )
        memo.setdefault(id(parameter), fake)
    for path, buffer in model.named_buffers(remove_duplicate=False):
        names[path] = first.setdefault(id(buffer), path)
        memo.setdefault(id(buffer), fake_like(buffer, mode, device))
    try:
        return copy.deepcopy(model, memo), names
    except Exception as error:
        raise CaptureError(
            f"{called} cannot be copied (capture traces a copy of the model): "
            f"{error}; keep what cannot be copied outside the model, or detach() its tensors"
        ) from error
