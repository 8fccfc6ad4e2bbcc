"""Rows of numbers of different lengths in two arrays, for passes over many nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Ragged:
    """Row ``i`` is ``items[starts[i]:starts[i + 1]]``."""

    starts: Ints
    items: Ints

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Ragged:
        """``rows`` as they are."""
        starts = _starts(np.fromiter(map(len, rows), np.int64, len(rows)))
        return Ragged(starts, np.fromiter(chain.from_iterable(rows), np.int64, starts[-1]))

    @staticmethod
    def sparse(rows: Mapping[int, Sequence[int]], count: int) -> Ragged:
        """``count`` rows, of which those in ``rows``, by number in ascending order, have items."""
        lengths = np.zeros(count, np.int64)
        lengths[list(rows)] = [len(row) for row in rows.values()]
        return Ragged(_starts(lengths), np.fromiter(chain.from_iterable(rows.values()), np.int64))

    @staticmethod
    def grouped(rows: Ints, items: Ints, count: int) -> Ragged:
        """``count`` rows of ``items``, which are given with their ``rows`` in ascending order."""
        return Ragged(_starts(np.bincount(rows, minlength=count)), items)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    @property
    def row_of(self) -> Ints:
        """The row of each item. It is not kept: plans would be twice as large."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def row(self, number: int) -> list[int]:
        """The items of a row."""
        row: list[int] = self.items[self.starts[number] : self.starts[number + 1]].tolist()
        return row

    def take(self, numbers: Ints) -> Ragged:
        """The rows ``numbers``."""
        lengths = self.lengths[numbers]
        starts = _starts(lengths)
        moved = np.repeat(self.starts[numbers] - starts[:-1], lengths)
        return Ragged(starts, self.items[np.arange(starts[-1]) + moved])

    def only(self, kept: Bools) -> Ragged:
        """The rows with the items that are ``kept``."""
        passed = np.concatenate(([0], np.cumsum(kept)))
        return Ragged(passed[self.starts], self.items[kept])

    def with_items(self, items: Ints) -> Ragged:
        """Rows of the same lengths with other items."""
        return Ragged(self.starts, items)

    def then(self, other: Ragged) -> Ragged:
        """The rows of this one, then those of ``other``."""
        starts = np.concatenate((self.starts, self.starts[-1] + other.starts[1:]))
        return Ragged(starts, np.concatenate((self.items, other.items)))

    def followed_by(self, other: Ragged) -> Ragged:
        """Each row of this one, then the same row of ``other``."""
        starts = self.starts + other.starts
        items = np.empty(starts[-1], np.int64)
        items[np.arange(len(self.items)) + other.starts[self.row_of]] = self.items
        items[np.arange(len(other.items)) + self.starts[1:][other.row_of]] = other.items
        return Ragged(starts, items)

    def tuples(self) -> list[tuple[int, ...]]:
        """The rows."""
        ends, items = self.starts.tolist(), self.items.tolist()
        return [tuple(items[a:b]) for a, b in pairwise(ends)]


def _starts(lengths: Ints) -> Ints:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))


def distinct(values: Ints) -> Ints:
    """The distinct ``values``, none negative, ascending. ``np.unique`` hashes numbers: that takes
    many times as long as sorting numbers that are mostly in order."""
    ordered = np.sort(values, kind="stable")
    return ordered[np.diff(ordered, prepend=-1) != 0]


def numbered(values: Ints) -> tuple[Ints, Ints]:
    """Numbers for ``values``, none negative, in the order in which distinct ones first occur; and
    the first place of each."""
    order = np.argsort(values, kind="stable")
    new = np.diff(values[order], prepend=-1) != 0
    first = np.sort(order[new])
    rank = np.empty(len(values), np.int64)
    rank[first] = np.arange(len(first))
    numbers = np.empty(len(values), np.int64)
    numbers[order] = rank[order[new]][np.cumsum(new) - 1]
    return numbers, first


def first_of_each(values: Ints, size: int) -> Ints:
    """For each number below ``size``, its first place in ``values``; -1 if it is not there."""
    first = np.full(size, -1, np.int64)
    first[values[::-1]] = np.arange(len(values) - 1, -1, -1)
    return first
