"""A copy of the model with its structure and code but without data: the copy that is traced."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from piper.base.errors import CaptureError
from piper.base.units import class_text
from piper.capture.trace.shared_memory import refuse_shared_memory


def fake_like(
    x: Tensor, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype | None = None
) -> FakeTensor:
    """A fake tensor with the shape, strides and dtype of ``x``, on ``device``. If ``dtype`` is
    given, it replaces a floating-point dtype."""
    kind = dtype if dtype is not None and x.is_floating_point() else x.dtype
    empty = torch.empty_strided(x.shape, x.stride(), dtype=kind, device="meta")
    return FakeTensor(mode, empty, device)


def skeleton_of(
    model: nn.Module,
    mode: FakeTensorMode,
    device: torch.device,
    called: str,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, dict[str, str]]:
    """A copy of ``model`` with fake tensors, and a map from each tensor's path to its first path
    (ties).

    Errors call the model ``called``. ``dtype``, if given, replaces the dtype of its floating-point
    parameters.
    """
    memo: dict[int, Any] = {}
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    # norms with running statistics compute in the precision of the statistics
    precise = {
        id(p)
        for module in model.modules()
        if isinstance(module, _NormBase)
        for p in module.parameters(recurse=False)
    }
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, UninitializedParameter):
            raise CaptureError(
                f"{path} is not initialized: run the lazy {called} once on a batch "
                "before it is captured"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise _never_called(path, "gradient")
        names[path] = first.setdefault(id(parameter), path)
        if id(parameter) not in memo:
            kind = None if id(parameter) in precise else dtype
            memo[id(parameter)] = _as_parameter(
                fake_like(parameter, mode, device, kind), parameter.requires_grad
            )
    for path, buffer in model.named_buffers(remove_duplicate=False):
        names[path] = first.setdefault(id(buffer), path)
        if id(buffer) not in memo:
            memo[id(buffer)] = fake_like(buffer, mode, device)
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise _never_called(path, "backward")
        for hooks in vars(module).values():
            if type(hooks) is OrderedDict and not hooks:
                memo[id(hooks)] = OrderedDict()  # deepcopy takes its time for it
    _refuse_kinds(tensors)
    try:
        for _, x in tensors:  # code may read attributes that somebody gave to a tensor
            if not isinstance(x, FakeTensor) and vars(x):
                vars(memo[id(x)]).update(copy.deepcopy(vars(x), memo))
        skeleton = copy.deepcopy(model, memo)
        _refuse_aliases(model, memo, names)
        refuse_shared_memory(model, names)
        return skeleton, names
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{called} cannot be copied (capture traces a copy of the model): "
            f"{error}; keep what cannot be copied outside the model, or detach() its tensors"
        ) from error


def _refuse_kinds(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors of other classes, which the copy would not have."""
    for path, x in tensors:
        if type(x) not in (Tensor, nn.Parameter, FakeTensor):
            raise CaptureError(
                f"{path.removeprefix('model.')} is {class_text(x)}, and a step computes with plain "
                "tensors alone: make it an nn.Parameter or a buffer of a plain tensor; attributes "
                "of it are kept"
            )


def _never_called(path: str, kind: str) -> CaptureError:
    return CaptureError(
        f"{path.removeprefix('model.')} has a {kind} hook, which would never be called: "
        "the backward is computed ahead of time; do it after the step"
    )


def _as_parameter(fake: FakeTensor, trained: bool) -> FakeTensor:
    """What ``nn.Parameter`` makes of ``fake``, without an operation."""
    fake._is_param = True
    return fake.requires_grad_(trained)  # type: ignore[return-value]


def _refuse_aliases(model: nn.Module, memo: dict[int, Any], names: dict[str, str]) -> None:
    """Refuse a plain tensor attribute that shares storage with a parameter or buffer: in the copy
    it would not follow changes of the parameter."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    owned = {id(tensor) for tensor in state.values()}
    storages = {_storage(t): names[path] for path, t in state.items() if not t.is_meta}
    for original in memo.get(id(memo), []):  # deepcopy lists the copied originals here
        if not isinstance(original, Tensor) or id(original) in owned or original.is_meta:
            continue
        if original.numel() and _storage(original) in storages:
            name = storages[_storage(original)].removeprefix("model.")
            raise CaptureError(
                f"a tensor attribute shares memory with {name!r}: capture would freeze it at "
                "today's values; compute it in forward, or register it as a buffer"
            )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def shared_buffers(model: nn.Module) -> dict[str, str]:
    """For each tensor that shares storage with another parameter or buffer, that one's path."""
    by_storage: dict[int, tuple[str, Tensor]] = {}
    shared: dict[str, str] = {}
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or not tensor.numel():
            continue
        other, first = by_storage.setdefault(_storage(tensor), (path, tensor))
        if first is not tensor:
            shared[path], shared[other] = other, path
    return shared
