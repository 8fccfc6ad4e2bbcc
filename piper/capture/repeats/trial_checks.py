"""What a trial must show, beside its result: it changes nothing that lasts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from piper.base.modes import autocast_kinds
from piper.capture.intercept.outside_effects import attributes_of, generators_now


class Outside:
    """All that a forward can change, beside its results."""

    def __init__(self, step: nn.Module, tensors: list[Tensor], depth: int) -> None:
        self._modes = torch.is_grad_enabled(), autocast_kinds(), depth
        self._versions = [x._version for x in tensors]
        self._generators = generators_now()
        self._attributes = attributes_of(step)

    def same(self, after: Outside) -> bool:
        """Whether nothing is different ``after``."""
        if self._known() != after._known() or self._attributes.keys() != after._attributes.keys():
            return False
        pairs = [(x, after._attributes[name]) for name, x in self._attributes.items()]
        return all(x is y or (not isinstance(x, Tensor) and x == y) for x, y in pairs)

    def _known(self) -> Any:
        return self._modes, self._versions, self._generators


class Watch(TorchFunctionMode):
    """Notes what a trial cannot contain: changes of modes, which make blocks of the graph, and
    tensors made from Python values, which are constants of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen = self.seen or func in _NOT_PLAIN
        return func(*args, **(kwargs or {}))


_NOT_PLAIN = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.tensor,
        torch.as_tensor,
        torch.from_numpy,
        torch.Tensor.new_tensor,
    }
)
