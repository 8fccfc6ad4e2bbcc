"""Rectangular slices of tensors: a start and a size along each dimension.

A device holds a contiguous range of a flat shard, which is not rectangular. The range splits into a
few boxes: the rest of a row, whole rows, the beginning of a row, and so on for inner dimensions.

    [0 0 0 1]
    [1 1 1 1]     elements 3 to 9 of a 4 x 4 tensor: three boxes
    [1 1 0 0]
    [0 0 0 0]
"""

from __future__ import annotations

import math
import operator
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

_PRIME = 2**61 - 1


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular slice of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(map(operator.add, self.start, self.shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def text(self) -> str:
        """In Python's slice notation."""
        return "[" + ", ".join(map("{}:{}".format, self.start, self.stop)) + "]"

    def of(self, whole: Tensor) -> Tensor:
        """This slice of ``whole``."""
        for dim, (low, n) in enumerate(zip(self.start, self.shape, strict=True)):
            whole = whole.narrow(dim, low, n)
        return whole

    def common(self, other: Box) -> Box | None:
        """The intersection; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        shape = tuple(map(operator.sub, stop, start))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def seen_from(self, other: Box) -> Box:
        """The same box, relative to the start of ``other``."""
        return Box(tuple(map(operator.sub, self.start, other.start)), self.shape)

    def moved(self, dim: int, by: int) -> Box:
        return Box(_with(self.start, dim, self.start[dim] + by), self.shape)

    def between(self, dim: int, low: int, high: int) -> Box | None:
        """The part of this box from ``low`` up to ``high`` along ``dim``; None if it is empty."""
        return self.common(Box(_with(self.start, dim, low), _with(self.shape, dim, high - low)))

    def without(self, other: Box) -> list[Box]:
        """This box minus ``other``, as disjoint boxes."""
        common = self.common(other)
        if common is None:
            return [self]
        outside: list[Box | None] = []
        rest = self
        for dim, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
            outside += [rest.between(dim, 0, low), rest.between(dim, high, rest.stop[dim])]
            rest = Box(_with(rest.start, dim, low), _with(rest.shape, dim, high - low))
        return [side for side in outside if side is not None]

    def cut(self, limit: int) -> Iterator[Box]:
        """This box as smaller boxes of at most ``limit`` elements."""
        if self.numel <= max(limit, 1):
            yield self
            return
        dim = next(i for i, n in enumerate(self.shape) if n > 1)
        low, n = self.start[dim], self.shape[dim]
        rows = max(1, n * limit // self.numel)
        for at in range(low, low + n, rows):
            part = self.between(dim, at, at + rows)
            assert part is not None
            yield from part.cut(limit)

    def offset(self, strides: Sequence[int]) -> int:
        """The elements before this box in the memory of a tensor with these strides."""
        return sum(map(operator.mul, self.start, strides))

    def reordered(self, dims: Sequence[int]) -> Box:
        """The box whose dimension ``dims[i]`` is this one's dimension i."""
        places = [dims.index(i) for i in range(len(dims))]
        return Box(tuple(self.start[i] for i in places), tuple(self.shape[i] for i in places))


def _with(numbers: tuple[int, ...], place: int, other: int) -> tuple[int, ...]:
    return (*numbers[:place], other, *numbers[place + 1 :])


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def tile(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Whether ``boxes`` cover every element of a tensor of this shape exactly once. The signed
    corners decide: if the boxes tile the tensor, all corners cancel except those of the whole.

    A box has 2**n corners in n dimensions. Each coordinate of each dimension gets a random number,
    and a corner is the product of n of them. So the signed sum over a box's corners is a product of
    n differences. Boxes that do not tile pass by chance about once in 10**16 times."""
    numbers: defaultdict[tuple[int, int], int] = defaultdict(lambda: secrets.randbelow(_PRIME))

    def corners(box: Box) -> int:
        total = 1 if box.numel else 0
        for dim, (low, n) in enumerate(zip(box.start, box.shape, strict=True)):
            total = total * (numbers[dim, low] - numbers[dim, low + n]) % _PRIME
        return total

    return sum(map(corners, boxes)) % _PRIME == corners(Box.whole(shape))


def boxes_of_range(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """The elements from ``low`` up to ``high`` of a tensor in row-major order, as boxes in that
    order. At most two boxes for each dimension."""
    if low >= high:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row
    if first > last:  # inside one row
        yield from _inside(shape, last, low - last * row, high - last * row)
        return
    if low < first * row:
        yield from _inside(shape, first - 1, low - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row < high:
        yield from _inside(shape, last, 0, high - last * row)


def _inside(shape: Sequence[int], row: int, low: int, high: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], low, high):
        yield Box((row, *box.start), (1, *box.shape))
