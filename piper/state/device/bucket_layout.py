"""The layout of a bucket in one flat buffer, and the part of it that a device has: as fragments of
the buffer, and as rectangular slices of the model's tensors.

A device's part of a parameter is a contiguous range (ZeRO) of a shard (experts, tensor
parallelism), in memory order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from piper.ir.rules import Bucket
from piper.ir.tensors import TensorSpec
from piper.state.checkpoint.boxes import Box, boxes_of_range, row_major
from piper.state.checkpoint.slices import Slice


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
        return row.as_strided(self.shapes[name], self.strides(name))

    def strides(self, name: str) -> tuple[int, ...]:
        """The strides of a parameter's shard."""
        shape, spec = self.shapes[name], self.specs[name]
        if shape == spec.shape and spec.nbytes == spec.numel * spec.dtype.itemsize:
            return spec.stride
        return row_major(shape)

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

    def fragment(self, name: str) -> Fragment:
        """The fragment of a parameter."""
        return next(one for one in self.fragments if one.name == name)

    @property
    def written(self) -> Iterator[Fragment]:
        """The parts of the fragments that this device writes. Devices with equal copies write a
        share each, cut at row boundaries."""
        low, high = self._cut(self.copy), self._cut(self.copy + 1)
        for one in self.fragments:
            first, last = max(low, one.start), min(high, one.stop)
            if first < last:
                yield Fragment(one.name, first, last, one.offset + first - one.start)

    def _cut(self, copy: int) -> int:
        """The start of a copy's share within the range that all copies have."""
        copies = self.bucket.copies
        at = self.share * copy // copies
        for one in self.fragments:
            if one.start < at < one.stop and copy < copies:
                shape = self.shapes[one.name]
                sized = zip(self.strides(one.name), shape, strict=True)
                row = max((stride for stride, n in sized if n > 1), default=1)
                inside = one.offset + at - one.start
                return max(one.start, one.start + inside // row * row - one.offset)
        return at

    def slices(
        self, table: str, fragment: Fragment, item: Tensor, *, flat: bool = True
    ) -> Iterator[Slice]:
        """``fragment`` as slices of the whole tensor. ``item`` has its elements in memory order,
        or, unless ``flat``, the whole shard in its shape."""
        name = fragment.name
        strides = self.strides(name)
        for whole, shard in self._boxes(fragment):
            if flat:
                at = item.storage_offset() + shard.offset(strides) - fragment.offset
                tensor = item.as_strided(shard.shape, strides, at)
            else:
                tensor = shard.of(item)
            yield Slice(table, name, self.specs[name].shape, item.dtype, whole, tensor)

    def _boxes(self, fragment: Fragment) -> Iterator[tuple[Box, Box]]:
        """The boxes of a fragment in the whole parameter and in the shard. In a fused weight, each
        section has its own. Padding is left out."""
        bucket, name = self.bucket, fragment.name
        strides, shape = self.strides(name), self.shapes[name]
        dims = sorted(range(len(shape)), key=lambda i: -strides[i])  # in memory order
        stop = fragment.offset + fragment.stop - fragment.start
        for box in boxes_of_range([shape[i] for i in dims], fragment.offset, stop):
            shard = box.reordered(dims)
            if bucket.ways == 1:
                yield shard, shard
                continue
            begin = start = 0
            for size in bucket.sections or (self.specs[name].shape[bucket.dim],):
                mine = -(-size // bucket.ways)  # elements past the end are padding
                here = min(mine, size - self.part * mine)
                part = shard.between(bucket.dim, begin, begin + here)
                if part is not None:
                    yield part.moved(bucket.dim, start + self.part * mine - begin), part
                begin, start = begin + mine, start + size
