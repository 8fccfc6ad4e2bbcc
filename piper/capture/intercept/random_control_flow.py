"""Control flow that depends on a random number, such as the choice of dropped layers (layerdrop).

A step is planned before any random number is drawn. If the probability is 0 or 1, the branch is
known and is taken; any other is refused, and the error names the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from piper.base.errors import CaptureError
from piper.capture.blame import calling_line

_UNIFORM = (torch.rand, torch.rand_like)
"""Functions that draw from [0, 1)."""
_BELOW = (torch.lt, torch.Tensor.lt, torch.Tensor.__lt__)
_NOT_BELOW = (torch.ge, torch.Tensor.ge, torch.Tensor.__ge__)


class DecideDraws(TorchFunctionMode):
    """While active, decides ``if torch.rand([]) < p`` for ``p`` = 0 or 1, and refuses it for any
    other ``p``."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, Tensor] = {}
        self._compared: dict[int, tuple[Tensor, bool | None]] = {}
        """Comparisons of drawn numbers with their outcomes; None if the outcome is random."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.__bool__ and id(args[0]) in self._compared:
            return self._decided(args[0])
        result = func(*args, **(kwargs or {}))
        if func in _UNIFORM:
            self._drawn[id(result)] = result
        elif func in (*_BELOW, *_NOT_BELOW) and args and id(args[0]) in self._drawn:
            self._compared[id(result)] = result, _outcome(func, args[1:])
        return result

    def _decided(self, comparison: Tensor) -> bool:
        outcome = self._compared[id(comparison)][1]
        if outcome is None:
            raise CaptureError(
                f"a random number decides at {calling_line()} what is computed, such as which "
                "layers are left out, but a step is planned before anything is drawn: set the "
                "probability to 0 (layerdrop=0 in the configuration of a model of transformers)"
            )
        return outcome


def _outcome(func: Callable[..., Any], bound: Sequence[Any]) -> bool | None:
    """The outcome of comparing a number in [0, 1) with ``bound``; None if it can be either."""
    if len(bound) != 1 or not isinstance(bound[0], int | float) or 0 < bound[0] < 1:
        return None
    return (bound[0] >= 1) == (func in _BELOW)
