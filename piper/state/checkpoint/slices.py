"""One slice of a named tensor: a box of it, and where its elements are.

Checkpoints, first weights, exports, switches and state dicts all copy slices into slices.
``covering`` pairs the slices that are wanted with the slices that have their elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from piper.base.codec import ArrayRecord, Count
from piper.ir.grouped import grouped
from piper.state.checkpoint.boxes import Box

MODEL, OPTIMIZER, STORED = "model", "optimizer.", "stored"
"""Tables of names: the model's tensors, state of an optimizer (one table for each kind, such as
``optimizer.exp_avg``), and other tensors of an optimizer."""


class Location(ArrayRecord, frozen=True):
    """Where a slice is stored: in a file, or in the memory of a device."""

    start: tuple[Count, ...]
    """The start and the shape of the box that is stored there."""
    shape: tuple[Count, ...]
    file: str
    """The file's name. In memory: the number of the device."""
    key: str
    """Its name in the file."""
    offset: Count
    """Bytes from the start of the file. In memory: its index among the device's slices."""
    crc32: Count
    """Of what was written; 0 in memory."""

    @property
    def box(self) -> Box:
        return Box(self.start, self.shape)


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of a named tensor."""

    table: str
    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: torch.dtype
    box: Box
    at: Tensor | Callable[[], Tensor] | Location | None = None
    """Its elements; a function that makes them when they are needed; or their place."""

    @staticmethod
    def of(table: str, name: str, tensor: Tensor) -> Slice:
        """A whole tensor in memory."""
        return Slice.whole(table, name, tensor.shape, tensor.dtype, tensor)

    @staticmethod
    def whole(
        table: str,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        at: Tensor | Callable[[], Tensor] | None = None,
    ) -> Slice:
        return Slice(table, name, tuple(shape), dtype, Box.whole(shape), at)

    @property
    def key(self) -> str:
        """Its name in a file."""
        prefix = "" if self.table == MODEL else self.table.replace(".", "/", 1) + "/"
        return prefix + self.name + ("" if self.box == Box.whole(self.shape) else self.box.text)

    @property
    def text(self) -> str:
        """Its name in messages."""
        return f"{self.table} {self.name}{self.box.text}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.box.shape) * self.dtype.itemsize

    @property
    def tensor(self) -> Tensor:
        """Its elements in memory."""
        tensor = self.at() if callable(self.at) else self.at
        assert isinstance(tensor, Tensor)
        return tensor

    @property
    def location(self) -> Location:
        assert isinstance(self.at, Location)
        return self.at

    def stored(self, file: str, offset: int) -> Slice:
        """The same at this place."""
        location = Location(self.box.start, self.box.shape, file, self.key, offset, 0)
        return replace(self, at=location)

    def part(self, box: Box) -> Slice:
        """The part in ``box``, which this slice contains."""
        at = self.at
        if isinstance(at, Tensor):
            at = box.seen_from(self.box).of(at)
        return replace(self, box=box, at=at)


T = TypeVar("T")


def runs(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """``items`` in lists whose sizes are at most ``most`` together, or of one larger item."""
    run: list[T] = []
    total = 0
    for item in items:
        if run and total + size(item) > most:
            yield run
            run, total = [], 0
        run.append(item)
        total += size(item)
    if run:
        yield run


Tables = Mapping[str, Mapping[str, Sequence[Slice]]]
"""Slices by table and name."""


def by_name(slices: Iterable[Slice]) -> Tables:
    tables = grouped((one.table, one) for one in slices)
    return {table: grouped((one.name, one) for one in rows) for table, rows in tables.items()}


def at_device(slices: Sequence[Slice], device: int) -> list[Slice]:
    """``slices`` in the memory of a device, for other processes."""
    return [one.stored(str(device), i) for i, one in enumerate(slices)]


def all_slices(tables: Tables) -> Iterator[Slice]:
    for tensors in tables.values():
        for slices in tensors.values():
            yield from slices


def covering(wants: Iterable[Slice], tables: Tables) -> Iterator[tuple[Slice, Slice]]:
    """The parts of all wanted slices, each after the part of a slice in ``tables`` that has its
    elements."""
    for want in wants:
        yield from covered(want, tables[want.table][want.name])


def covered(want: Slice, slices: Iterable[Slice]) -> Iterator[tuple[Slice, Slice]]:
    """The same for one wanted slice and slices of the same tensor."""
    for one in slices:
        if (common := want.box.common(one.box)) is not None:
            yield one.part(common), want.part(common)
