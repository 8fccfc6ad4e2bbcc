"""What a device has of a bucket, as rectangular slices of the model's own tensors.

A device's part of a parameter is a range (ZeRO) of a shard (experts, tensor parallelism), as it
lies in memory. A ``Piece`` is a box of it: where it is in the whole parameter, and where in the
shard.
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
    """In the parameter that the model has."""
    shard: Box
    """In this device's shard of it."""

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
    dims = sorted(range(len(shape)), key=lambda i: -strides[i])  # as they lie in memory
    stop = fragment.offset + fragment.stop - fragment.start
    boxes = boxes_of_range([shape[i] for i in dims], fragment.offset, stop)
    return [piece for box in boxes for piece in _in_whole(layout, name, box.reordered(dims))]


def whole_shard(layout: BucketLayout, name: str) -> list[Piece]:
    """The boxes of this device's whole shard of a parameter."""
    box = Box.whole(layout.shapes[name])
    return _in_whole(layout, name, box) if box.numel else []


def _in_whole(layout: BucketLayout, name: str, box: Box) -> list[Piece]:
    """Where a box of the shard is in the whole parameter: for a fused weight, one of each
    section."""
    bucket = layout.bucket
    if bucket.ways == 1:
        return [Piece(box, box)]
    found = []
    begin = start = 0
    for size in bucket.sections or (layout.specs[name].shape[bucket.dim],):
        mine = -(-size // bucket.ways)  # what is after the last element is padding
        part = box.between(bucket.dim, begin, begin + min(mine, size - layout.part * mine))
        if part is not None:
            found.append(Piece(part.moved(bucket.dim, start + layout.part * mine - begin), part))
        begin, start = begin + mine, start + size
    return found


def _strides(layout: BucketLayout, name: str) -> tuple[int, ...]:
    """How a shard lies in memory; see ``BucketLayout.view``."""
    shape, spec = layout.shapes[name], layout.specs[name]
    if shape == spec.shape and spec.nbytes == spec.numel * spec.dtype.itemsize:
        return spec.stride
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def written_by(layout: BucketLayout) -> list[tuple[int, Fragment]]:
    """What this device writes of what it updates, each with the index of the fragment that it is
    of: equal copies write a share each, cut where rows begin."""
    low, high = _cut(layout, layout.copy), _cut(layout, layout.copy + 1)
    found = []
    for place, one in enumerate(layout.fragments):
        first, last = max(low, one.start), min(high, one.stop)
        if first < last:
            part = Fragment(one.name, first, last, one.offset + first - one.start)
            found.append((place, part))
    return found


def _cut(layout: BucketLayout, copy: int) -> int:
    """Where the share of a copy begins in the range that each of them has."""
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
