"""How a bucket of parameters lies in one flat buffer, and which part of it a device has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from piper.ir.rules import Bucket
from piper.ir.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of a parameter that lies in a range of the flat buffer."""

    name: str
    start: int
    """Where it begins in the buffer's range."""
    stop: int
    offset: int
    """Where it begins in the parameter, counted in elements as they lie in memory."""


@dataclass(frozen=True)
class BucketLayout:
    """One device's view of a bucket."""

    bucket: Bucket
    specs: Mapping[str, TensorSpec]
    """The whole parameters."""
    index: int
    """This device's index among those that hold the same values, in this or in other copies."""
    part: int
    """Which share of the experts it has."""

    @staticmethod
    def of(bucket: Bucket, specs: Mapping[str, TensorSpec], device: int) -> BucketLayout | None:
        """The layout for ``device``, or None if it holds nothing of the bucket."""
        for part, group in enumerate(bucket.groups):
            if device in group:
                mine = {name: specs[name] for name in bucket.parameters}
                return BucketLayout(bucket, mine, group.index(device), part)
        return None

    @property
    def copy(self) -> int:
        """Which of the equal copies of the bucket this device has, or has a part of."""
        return self.index // self.bucket.within

    @property
    def rank(self) -> int:
        """Which part of its copy it has."""
        return self.index % self.bucket.within

    @property
    def sharded(self) -> bool:
        """Whether each device updates a part of its own."""
        return self.bucket.level >= 1

    @property
    def scattered(self) -> bool:
        """Whether the parameters themselves are kept in parts."""
        return self.bucket.level == 3

    @property
    def sliced(self) -> bool:
        """Whether what it updates are flat ranges, and not tensors of their own shape."""
        return self.sharded and self.bucket.sliced

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each parameter on this device: the last shard of an uneven dimension is
        padded."""
        ways, dim = self.bucket.ways, self.bucket.dim
        return {
            name: tuple(-(-n // ways) if i == dim else n for i, n in enumerate(spec.shape))
            for name, spec in self.specs.items()
        }

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Where each parameter begins in the whole buffer."""
        return dict(zip(self.bucket.parameters, self.bucket.offsets, strict=True))

    @property
    def share(self) -> int:
        """Elements of one device's part."""
        return self.bucket.share

    @property
    def padded(self) -> int:
        """Elements of the whole buffer, filled up to even parts."""
        return self.share * self.bucket.within

    @property
    def mine(self) -> tuple[int, int]:
        """The range of the whole buffer that this device updates."""
        start = self.rank * self.share
        return start, start + self.share

    def buffer(self, dtype: torch.dtype, where: torch.device) -> Tensor:
        """A whole buffer to be filled: what belongs to no parameter is zero."""
        if self._uneven:
            return torch.zeros(self.padded, dtype=dtype, device=where)
        flat = torch.empty(self.padded, dtype=dtype, device=where)
        for start, stop in self._gaps:
            flat[start:stop].zero_()
        return flat

    @property
    def _uneven(self) -> bool:
        """Whether shards have padding."""
        ways, dim = self.bucket.ways, self.bucket.dim
        if ways == 1 or self.bucket.sections:
            return False
        return any(spec.shape[dim] % ways for spec in self.specs.values())

    @cached_property
    def _gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the whole buffer between and after the parameters."""
        found, end = [], 0
        for start, size in sorted(zip(self.bucket.offsets, self.bucket.sizes, strict=True)):
            found.append((end, start))
            end = start + size
        return tuple((low, high) for low, high in (*found, (end, self.padded)) if low < high)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A parameter in the whole buffer."""
        start = self.offsets[name]
        return self.shaped(flat[start : start + math.prod(self.shapes[name])], name)

    def shaped(self, row: Tensor, name: str) -> Tensor:
        """A parameter that lies in ``row``, with the strides that its model has if it is whole."""
        shape, spec = self.shapes[name], self.specs[name]
        if shape == spec.shape and spec.nbytes == spec.numel * spec.dtype.itemsize:
            return row.as_strided(shape, spec.stride)
        return row.view(shape)

    def updated(self, row: Tensor, fragment: Fragment) -> Tensor:
        """A fragment as the optimizer is given it; ``row`` is this device's range."""
        mine = row[fragment.start : fragment.stop]
        return mine if self.sliced else self.shaped(mine, fragment.name)

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """What this device updates, parameter by parameter, within its range: whole parameters,
        if they are not sliced."""
        low, high = self.mine
        found = []
        for name in self.bucket.parameters:
            start = self.offsets[name]
            stop = start + math.prod(self.shapes[name])
            first, last = max(low, start), min(high, stop)
            if first < last:
                found.append(Fragment(name, first - low, last - low, first - start))
        return tuple(found)
