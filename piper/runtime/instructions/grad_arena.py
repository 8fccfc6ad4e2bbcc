"""Contiguous memory for accumulated gradients.

These gradients live from a chunk's first backward to the update. Allocated one by one, they would
be scattered among short-lived tensors, and the allocator could not reuse the gaps between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from piper.ir.tensors import TensorSpec
from piper.lower.plans.accumulation import LINE


class GradArena:
    """A layout of tensors side by side: one buffer for each dtype."""

    def __init__(
        self, specs: Sequence[TensorSpec], dtypes: Sequence[torch.dtype], where: torch.device
    ) -> None:
        """``dtypes`` replace the dtypes of ``specs``."""
        self._where = where
        self._sizes: defaultdict[torch.dtype, int] = defaultdict(int)
        self._places: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []
        for spec, dtype in zip(specs, dtypes, strict=True):
            stride = spec.stride
            if spec.copied is not None:  # the first use of the meta device imports sympy
                stride = torch.empty_like(spec.empty(torch.device("meta"))).stride()
            line = LINE // dtype.itemsize
            self._places.append((dtype, spec.shape, stride, self._sizes[dtype]))
            self._sizes[dtype] += -(-spec.numel // line) * line

    def empty(self) -> list[Tensor]:
        """Uninitialised tensors in this layout."""
        flat = {
            kind: torch.empty(size, dtype=kind, device=self._where)
            for kind, size in self._sizes.items()
        }
        return [
            flat[kind].as_strided(shape, stride, start)
            for kind, shape, stride, start in self._places
        ]
