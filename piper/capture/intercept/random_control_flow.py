"""Control flow by a random number, such as the choice of layers to leave out (layerdrop).

A step is planned before anything is drawn. Where no draw can change the choice, since its
probability is 0 or 1, it is made; any other is refused in the user's own line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from piper.base.errors import CaptureError
from piper.capture.blame import calling_line

_UNIFORM = (torch.rand, torch.rand_like)
"""What draws from [0, 1)."""
_BELOW = (torch.lt, torch.Tensor.lt, torch.Tensor.__lt__)
_NOT_BELOW = (torch.ge, torch.Tensor.ge, torch.Tensor.__ge__)


class DecideDraws(TorchFunctionMode):
    """While it is active, ``if torch.rand([]) < p`` is decided for a ``p`` of 0 or 1, and an error
    for any other."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, Tensor] = {}
        self._compared: dict[int, tuple[Tensor, bool | None]] = {}
        """Comparisons of what was drawn, and how they come out, if always alike."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
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
    """Whether a number of [0, 1) is below ``bound``, or not below it; None if that depends."""
    if len(bound) != 1 or not isinstance(bound[0], int | float) or 0 < bound[0] < 1:
        return None
    return (bound[0] >= 1) == (func in _BELOW)
