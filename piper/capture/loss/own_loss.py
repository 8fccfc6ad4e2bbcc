"""The loss in a model's own output, which is trained if no ``loss=`` is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from piper.base.errors import CaptureError
from piper.base.units import class_text

Loss = Callable[..., Tensor | tuple[Tensor, Tensor]]


def loss_or_own(loss: Loss | None, targets: Sequence[Any]) -> Loss:
    """``loss``, or, without one, the loss in the model's output, which takes no targets."""
    if loss is not None:
        return loss
    if isinstance(targets, Sequence) and len(targets):
        raise CaptureError(
            "targets= needs a loss, and none is given: give loss=, a function (output, *targets), "
            "or, to a model that computes its loss itself, the targets among its inputs (labels)"
        )
    return own_loss


def refuse_counted(inputs: Sequence[Any] | Mapping[str, Any]) -> None:
    """Refuse a plain number as ``num_items_in_batch``: capture would fix it, but each batch has its
    own count of labels."""
    count = inputs.get("num_items_in_batch", 1) if isinstance(inputs, Mapping) else 1
    if not isinstance(count, Tensor) and count != 1:
        raise CaptureError(
            f"inputs['num_items_in_batch'] is {count!r}, which every batch would be divided by: "
            "leave it out, since the labels of the whole batch are counted without it, or give a "
            "tensor without dimensions"
        )


def refuse_keywords_in_tuple(model: nn.Module, inputs: object) -> None:
    """Refuse a mapping of keyword arguments as the only positional argument."""
    if not (isinstance(inputs, tuple | list) and len(inputs) == 1):
        return
    (only,), names = inputs, inspect.signature(model.forward).parameters
    if isinstance(only, Mapping) and only and all(name in names for name in only):
        raise CaptureError(
            f"inputs= is a {type(inputs).__name__} of one mapping, which would be the first "
            f"argument of {type(model).__name__}, {next(iter(names))}: give the mapping itself, "
            f"inputs={{{next(iter(only))!r}: ...}}"
        )


def own_loss(output: Any) -> Tensor:
    """The loss in a model's output: its ``loss`` (transformers models return one if they get
    labels), or the output itself if it is one tensor."""
    if isinstance(output, Tensor):
        if output.numel() != 1:
            raise CaptureError(
                f"no loss= is given, and the model returns a tensor of shape {list(output.shape)}, "
                "which is not a loss: give loss=, a function (output, *targets), and targets="
            )
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"the model returns no loss: its output is {class_text(output)} without one; give "
            "loss=, a function (output, *targets), or what the model computes its loss from "
            "(inputs={..., 'labels': ...} for a model of transformers)"
        )
    return loss
