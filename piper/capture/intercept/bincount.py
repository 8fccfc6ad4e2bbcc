"""``torch.bincount`` with a fixed number of bins.

In torch, the result has ``minlength`` elements, or more if the input has a larger number. In a
captured step it has exactly ``minlength`` elements: routers count expert indices, which are below
the number of experts. A larger number is an error when the step runs.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("piper::bincount", mutates_args=())
def bincount(x: Tensor, bins: int) -> Tensor:
    """How often each number below ``bins`` occurs in ``x``; larger numbers are an error."""
    if x.is_cuda:  # an index out of bounds is a device-side error: the host does not wait
        return x.new_zeros(bins, dtype=torch.int64).scatter_add_(
            0, x.long(), torch.ones_like(x, dtype=torch.int64)
        )
    counts = torch.bincount(x, minlength=bins)
    if len(counts) > bins:
        raise RuntimeError(
            f"torch.bincount(..., minlength={bins}) was given the number {len(counts) - 1}: in a "
            "captured step the result has minlength elements, so give it at least one more"
        )
    return counts


@bincount.register_fake
def _(x: Tensor, bins: int) -> Tensor:
    return x.new_empty(bins, dtype=torch.int64)


BINCOUNT = torch.ops.piper.bincount.default
