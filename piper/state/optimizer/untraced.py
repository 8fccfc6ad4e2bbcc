"""Torch's optimizers without torch's tracer, for processes that trace no optimizer.

Torch imports its tracer, which takes as long as the rest of torch, when an optimizer is made and
when it steps: only to keep the tracer out of these functions. Where torch's code is not as expected
here, it imports the tracer as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from piper.state.optimizer.nature import KNOWN


def leave_out_tracer() -> None:
    """Optimizers of this process do not import torch's tracer. Call it before one is made."""
    for method in vars(torch.optim.Optimizer).values():
        if function := getattr(method, "__wrapped__", None):
            function.__dynamo_disable = function  # torch keeps here what the tracer makes of it
    for kind in KNOWN:
        step = vars(kind).get("step")
        if step is not None and step.__code__.co_name == "_use_grad":
            kind.step = _untraced(step.__wrapped__)  # type: ignore[method-assign]


def _untraced(step: Callable[..., Any]) -> Callable[..., Any]:
    """The ``step`` of an optimizer, with gradients only if the optimizer is differentiable."""

    @wraps(step)
    def run(optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(bool(optimizer.defaults["differentiable"])):
            return step(optimizer, *arguments, **options)

    return run
