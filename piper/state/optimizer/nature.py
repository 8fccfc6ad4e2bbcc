"""What is known of an optimizer without trying it: torch's own classes, and what others declare.

torch's optimizers update each parameter by itself, in whatever calls. So a device may update its
parameters bucket by bucket, and has the same result without the parameters of other devices. The
table says which of them also update each element by itself, so that a parameter may be cut. An
optimizer of any other class is tried (``trial.py``). It can declare ``needs_whole_tensors = True``
where small tensors would not show it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from piper.state.optimizer.ema import Averaging

_ELEMENTWISE = frozenset((
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad,
    optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
))  # fmt: skip
_WHOLE_TENSORS = frozenset((optim.Adafactor, optim.Muon))
KNOWN: frozenset[type[torch.optim.Optimizer]] = _ELEMENTWISE | _WHOLE_TENSORS

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def is_known(member: torch.optim.Optimizer) -> bool:
    """Whether the table describes it: torch's class itself, with no hook and its own ``step``."""
    everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    changed = has_hooks(member) or everywhere or "step" in vars(member)
    return type(member) in KNOWN and not changed


def hooks_of(member: torch.optim.Optimizer) -> list[Any]:
    """The hooks on its ``step``."""
    return [hook for hooks in _HOOKS for hook in getattr(member, hooks, {}).values()]


def has_hooks(member: torch.optim.Optimizer) -> bool:
    """Whether the user registered hooks on its ``step``."""
    return not all(isinstance(hook, Averaging) for hook in hooks_of(member))


def needs_whole_tensors(member: torch.optim.Optimizer) -> bool:
    """Whether it is known, or declares, that it cannot update a part of a parameter."""
    return type(member) in _WHOLE_TENSORS or getattr(member, "needs_whole_tensors", False)
