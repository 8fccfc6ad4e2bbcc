"""The shape, strides and dtype of a tensor before it exists, and so its bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from piper.base.codec import ArrayRecord, Count

_MOST_BYTES = 2**62


class TensorSpec(ArrayRecord, frozen=True):
    """Shape, strides and dtype of an argument or result of a program."""

    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride):
            raise ValueError(f"{len(self.shape)} sizes, but {len(self.stride)} strides")
        if max(self.nbytes, self.numel * self.dtype.itemsize) >= _MOST_BYTES:
            raise ValueError(f"a tensor of sizes {list(self.shape)} is too large to exist")

    @staticmethod
    def of(x: Tensor) -> TensorSpec:
        return TensorSpec(tuple(x.shape), tuple(x.stride()), x.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of storage: an expanded dimension takes none, a gap between rows counts."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def empty(self, where: torch.device) -> Tensor:
        """An uninitialized tensor of this spec."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=where)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def copied(self) -> int | None:
        """Bytes of the contiguous copy that messages carry; None if the tensor is contiguous."""
        step, dense = 1, []
        for n in reversed(self.shape):
            dense.append(step)
            step *= max(n, 1)
        return None if self.stride == tuple(reversed(dense)) else self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def overlaps(x: Tensor) -> bool:
    """Whether several elements of ``x`` share memory (an expanded dimension)."""
    return any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))
