"""The layout of a bucket in one flat buffer, and the part of it that a device has."""

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
    """The part of a parameter in a range of the flat buffer. All numbers count elements."""

    name: str
    start: int
    """Its start within the range."""
    stop: int
    offset: int
    """Its start within the device's shard of the parameter, in memory order."""


@dataclass(frozen=True)
class BucketLayout:
    """One device's view of a bucket."""

    bucket: Bucket
    specs: Mapping[str, TensorSpec]
    """The unsharded parameters."""
    index: int
    """This device's index in its group: the devices with the same values, over all copies."""
    part: int
    """Index of its shard along the bucket's axis, such as its share of the experts."""

    @staticmethod
    def of(bucket: Bucket, specs: Mapping[str, TensorSpec], device: int) -> BucketLayout | None:
        """The layout for ``device``; None if the device has no part of the bucket."""
        for part, group in enumerate(bucket.groups):
            if device in group:
                mine = {name: specs[name] for name in bucket.parameters}
                return BucketLayout(bucket, mine, group.index(device), part)
        return None

    @property
    def copy(self) -> int:
        """Index of the copy of the bucket that this device has, whole or in part."""
        return self.index // self.bucket.within

    @property
    def rank(self) -> int:
        """Index of this device's part within its copy."""
        return self.index % self.bucket.within

    @property
    def sharded(self) -> bool:
        """Whether each device updates only its own part (ZeRO-1 and above)."""
        return self.bucket.level >= 1

    @property
    def scattered(self) -> bool:
        """Whether the parameters themselves are sharded (ZeRO-3)."""
        return self.bucket.level == 3

    @property
    def sliced(self) -> bool:
        """Whether the optimizer gets flat ranges instead of tensors with their own shapes."""
        return self.sharded and self.bucket.sliced

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each parameter's shard on this device. If the dimension does not divide
        evenly, shards are padded."""
        ways, dim = self.bucket.ways, self.bucket.dim
        return {
            name: tuple(-(-n // ways) if i == dim else n for i, n in enumerate(spec.shape))
            for name, spec in self.specs.items()
        }

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """The start of each parameter in the whole buffer."""
        return dict(zip(self.bucket.parameters, self.bucket.offsets, strict=True))

    @property
    def share(self) -> int:
        """Elements in one device's part."""
        return self.bucket.share

    @property
    def padded(self) -> int:
        """Elements in the whole buffer, padded to equal parts."""
        return self.share * self.bucket.within

    @property
    def mine(self) -> tuple[int, int]:
        """The range of the whole buffer that this device updates."""
        start = self.rank * self.share
        return start, start + self.share

    def buffer(self, dtype: torch.dtype, where: torch.device) -> Tensor:
        """A whole buffer for the caller to fill. Padding is zero."""
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
        gaps, end = [], 0
        for start, size in sorted(zip(self.bucket.offsets, self.bucket.sizes, strict=True)):
            gaps.append((end, start))
            end = start + size
        return tuple((low, high) for low, high in (*gaps, (end, self.padded)) if low < high)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A view of a parameter in the whole buffer."""
        start = self.offsets[name]
        return self.shaped(flat[start : start + math.prod(self.shapes[name])], name)

    def shaped(self, row: Tensor, name: str) -> Tensor:
        """The flat ``row`` in the parameter's shape, with the model's strides if unsharded."""
        shape, spec = self.shapes[name], self.specs[name]
        if shape == spec.shape and spec.nbytes == spec.numel * spec.dtype.itemsize:
            return row.as_strided(shape, spec.stride)
        return row.view(shape)

    def updated(self, row: Tensor, fragment: Fragment) -> Tensor:
        """A fragment in the form the optimizer gets. ``row`` is this device's range."""
        mine = row[fragment.start : fragment.stop]
        return mine if self.sliced else self.shaped(mine, fragment.name)

    @cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """The parts of parameters that this device updates, relative to its range. Unless sliced,
        each is a whole parameter."""
        low, high = self.mine
        fragments = []
        for name in self.bucket.parameters:
            start = self.offsets[name]
            stop = start + math.prod(self.shapes[name])
            first, last = max(low, start), min(high, stop)
            if first < last:
                fragments.append(Fragment(name, first - low, last - low, first - start))
        return tuple(fragments)
