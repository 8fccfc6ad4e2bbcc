"""Checks of a loss: it takes the output and the targets, and returns one scalar or (sum, count)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from piper.base.errors import CaptureError
from piper.base.units import counted
from piper.capture.blame import user_name
from piper.capture.graphs import ancestors


def refuse_uncallable(loss: object, targets: Sequence[Any]) -> None:
    """Refuse a loss that cannot be called with the model's output and ``targets``."""
    if isinstance(loss, type):
        raise CaptureError(f"loss={loss.__name__} is a class: give an instance, {loss.__name__}()")
    if not callable(loss):
        raise CaptureError(f"loss={loss!r} cannot be called: give a function (output, *targets)")
    try:
        wanted = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        wanted.bind(None, *targets)
    except TypeError:
        names = ", ".join(wanted.parameters)
        raise CaptureError(
            f"the loss takes ({names}), but it is given the model's output and "
            f"{counted(len(targets), 'target')}: give targets=(y,), one for each argument after "
            "the output"
        ) from None


def check_loss(loss: Any) -> tuple[Tensor, ...]:
    """The loss's result as a tuple, (mean,) or (sum, count); anything else is refused."""
    parts = loss if isinstance(loss, tuple) else (loss,)
    good = len(parts) in (1, 2) and all(isinstance(x, Tensor) and x.numel() == 1 for x in parts)
    good = good and (len(parts) == 1 or not (parts[1].is_complex() or parts[1].dtype == torch.bool))
    if not good or not parts[0].is_floating_point():
        given = [_described(x) for x in parts]
        many = isinstance(loss, Tensor) and loss.numel() > 1
        raise CaptureError(
            "the loss must return one real scalar (a mean over the microbatch) or a pair of "
            f"scalars (sum, count); it returned {given[0] if len(given) == 1 else given}"
            f"{': return its mean, loss.mean()' if many else ''}"
            f"{': return the tensor, without .item()' if _is_number(loss) else ''}"
        )
    return parts


def _is_number(x: Any) -> bool:
    """Whether ``x`` is a Python number, or the symbol that stands for one in a trace."""
    return isinstance(x, int | float | torch.SymInt | torch.SymFloat)


def _described(x: Any) -> str:
    if _is_number(x):
        return "a number"
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')}{tuple(x.shape)}"


def refuse_metric(count: fx.Node, step: nn.Module, parameters: Mapping[fx.Node, str]) -> None:
    """Refuse a count that depends on trained parameters. A count depends on the batch only; such a
    value is a metric, and dividing by it would scale the loss and all gradients."""
    trained = {user_name(n, {}) for n, p in step.named_parameters() if p.requires_grad}
    behind = ancestors([count], ())
    for node, name in parameters.items():
        if node in behind and name in trained:
            raise CaptureError(
                "the loss returns a pair, which is taken for (sum, count), but its second value "
                f"depends on a trained parameter ({name}) and so counts nothing: "
                "return the loss alone, and report metrics with outputs="
            )
