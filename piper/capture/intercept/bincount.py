"""``torch.bincount`` with a fixed number of bins.

Its result has as many elements as ``minlength`` says, or more if a number is larger. While a model
is traced it has just as many: numbers of experts, which routers count, are below their number. A
larger one is an error when the step runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("piper::bincount", mutates_args=())
def bincount(x: Tensor, bins: int) -> Tensor:
    """How often each number below ``bins`` occurs in ``x``, in which there is no other."""
    if x.is_cuda:  # where an index out of bounds is an error that no host waits for
        return x.new_zeros(bins, dtype=torch.int64).scatter_add_(
            0, x.long(), torch.ones_like(x, dtype=torch.int64)
        )
    found = torch.bincount(x, minlength=bins)
    if len(found) > bins:
        raise RuntimeError(
            f"torch.bincount(..., minlength={bins}) was given the number {len(found) - 1}: in a "
            "captured step the result has minlength elements, so give it at least one more"
        )
    return found


@bincount.register_fake
def _(x: Tensor, bins: int) -> Tensor:
    return x.new_empty(bins, dtype=torch.int64)


class FixedCounts(TorchFunctionMode):
    """Lets ``torch.bincount(x, minlength=...)`` have a fixed number of bins."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in (torch.bincount, Tensor.bincount):
            x, weights, bins = _arguments(*args, **given)
            if weights is None and bins > 0:
                return torch.ops.piper.bincount(x, bins)
        return func(*args, **given)


def _arguments(
    input: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> tuple[Tensor, Tensor | None, int]:
    return input, weights, minlength
