"""``piper.EMA``: an optimizer that also keeps an exponential moving average of the weights.

The average of a parameter is optimizer state. So each device averages what it updates, and the
average is sharded, counted in the memory of the program, saved, resumed and moved like the rest of
that state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.state.optimizer.factory import OptimizerFactory

_AVERAGE = "average"
"""The key of the average in a parameter's optimizer state."""


class EMA:
    """``optimizer=piper.EMA(lambda parameters: ..., decay=0.999)``. After the first step the
    average is the weights; after each later step it becomes ``decay * average + (1 - decay) *
    weights``, as in ``torch.optim.swa_utils``. ``trainer.averaged()`` uses it."""

    def __init__(self, optimizer: OptimizerFactory, decay: float = 0.999) -> None:
        if not callable(optimizer):
            raise PiperError(
                f"EMA(optimizer={optimizer!r}) must be a function from a list of parameters to an "
                "optimizer, as optimizer= of compile"
            )
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise PiperError(f"EMA(decay={decay!r}) must be a number from 0 to below 1")
        self.__wrapped__ = optimizer  # its signature says whether it takes names
        self.decay = decay

    def __call__(self, given: Any) -> Any:
        returned: Any = self.__wrapped__(given)
        for one in returned if isinstance(returned, list | tuple) else [returned]:
            if isinstance(one, torch.optim.Optimizer):
                one.register_step_post_hook(Averaging(self.decay))
        return returned


@dataclass(frozen=True, slots=True)
class Averaging:
    """Averages each element by itself, so it works on any part of the parameters."""

    decay: float

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is None:
                continue
            kept = optimizer.state[parameter]
            if _AVERAGE in kept:
                kept[_AVERAGE].lerp_(parameter, 1 - self.decay)
            else:
                kept[_AVERAGE] = parameter.detach().clone()


@torch.no_grad()
def swap_averages(parameters: Iterable[nn.Parameter], state: Mapping[Any, Any]) -> None:
    """Exchange parameters with their averages in the optimizer's ``state``; before the first step
    there are none."""
    for parameter in parameters:
        average: Tensor | None = state.get(parameter, {}).get(_AVERAGE)
        if average is not None:
            before = parameter.clone()
            parameter.copy_(average)
            average.copy_(before)
