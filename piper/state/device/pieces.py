"""A device's part of a bucket as rectangular slices of the model's tensors.

A device's part of a parameter is a contiguous range (ZeRO) of a shard (experts, tensor
parallelism), in memory order. A ``Piece`` is one box of it, with its place in the whole parameter
and its place in the shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from piper.state.checkpoint.boxes import Box, boxes_of_range
from piper.state.device.bucket_layout import BucketLayout, Fragment


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one device's part of a parameter."""

    whole: Box
    """Its place in the model's parameter."""
    shard: Box
    """Its place in this device's shard."""

    def of_range(self, row: Tensor, layout: BucketLayout, fragment: Fragment) -> Tensor:
        """This piece of ``row``, which holds the elements of ``fragment``."""
        strides = _strides(layout, fragment.name)
        at = sum(a * s for a, s in zip(self.shard.start, strides, strict=True)) - fragment.offset
        return row.as_strided(self.shard.shape, strides, row.storage_offset() + at)


def pieces_of(layout: BucketLayout, fragment: Fragment) -> list[Piece]:
    """The boxes of a fragment."""
    name = fragment.name
    strides = _strides(layout, name)
    shape = layout.shapes[name]
    dims = sorted(range(len(shape)), key=lambda i: -strides[i])  # in memory order
    stop = fragment.offset + fragment.stop - fragment.start
    boxes = boxes_of_range([shape[i] for i in dims], fragment.offset, stop)
    return [piece for box in boxes for piece in _in_whole(layout, name, box.reordered(dims))]


def whole_shard(layout: BucketLayout, name: str) -> list[Piece]:
    """The boxes of this device's whole shard of a parameter."""
    box = Box.whole(layout.shapes[name])
    return _in_whole(layout, name, box) if box.numel else []


def _in_whole(layout: BucketLayout, name: str, box: Box) -> list[Piece]:
    """The places of a shard's box in the whole parameter. A fused weight has up to one for each
    section. Padding is left out."""
    bucket = layout.bucket
    if bucket.ways == 1:
        return [Piece(box, box)]
    pieces = []
    begin = start = 0
    for size in bucket.sections or (layout.specs[name].shape[bucket.dim],):
        mine = -(-size // bucket.ways)  # elements past the end are padding
        part = box.between(bucket.dim, begin, begin + min(mine, size - layout.part * mine))
        if part is not None:
            pieces.append(Piece(part.moved(bucket.dim, start + layout.part * mine - begin), part))
        begin, start = begin + mine, start + size
    return pieces


def _strides(layout: BucketLayout, name: str) -> tuple[int, ...]:
    """The strides of a shard in memory; see ``BucketLayout.shaped``."""
    shape, spec = layout.shapes[name], layout.specs[name]
    if shape == spec.shape and spec.nbytes == spec.numel * spec.dtype.itemsize:
        return spec.stride
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def written_by(layout: BucketLayout) -> list[tuple[int, Fragment]]:
    """The parts of its fragments that this device writes, each with its fragment's index. Devices
    with equal copies write a share each, cut at row boundaries."""
    low, high = _cut(layout, layout.copy), _cut(layout, layout.copy + 1)
    parts = []
    for place, fragment in enumerate(layout.fragments):
        first, last = max(low, fragment.start), min(high, fragment.stop)
        if first < last:
            offset = fragment.offset + first - fragment.start
            parts.append((place, Fragment(fragment.name, first, last, offset)))
    return parts


def _cut(layout: BucketLayout, copy: int) -> int:
    """The start of a copy's share within the range that all copies have."""
    copies = layout.bucket.copies
    at = layout.share * copy // copies
    for one in layout.fragments:
        if one.start < at < one.stop and copy < copies:
            strides = _strides(layout, one.name)
            row = max(
                (s for s, n in zip(strides, layout.shapes[one.name], strict=True) if n > 1),
                default=1,
            )
            inside = one.offset + at - one.start
            return max(one.start, one.start + inside // row * row - one.offset)
    return at
