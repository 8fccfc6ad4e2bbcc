"""What nodes read, write and wait for, as arrays over all nodes of a DAG."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from piper.ir.dag.ragged import Ints, Ragged, distinct


class Wired(Protocol):
    """A node, as far as edges are concerned."""

    @property
    def reads(self) -> tuple[int, ...]: ...
    @property
    def writes(self) -> tuple[int, ...]: ...
    @property
    def after(self) -> tuple[int, ...]: ...


class Edges:
    """The edges between nodes, which are values and orders."""

    def __init__(self, nodes: Sequence[Wired]) -> None:
        self._nodes = nodes

    @cached_property
    def reads(self) -> Ragged:
        return Ragged.of([node.reads for node in self._nodes])

    @cached_property
    def writes(self) -> Ragged:
        return Ragged.of([node.writes for node in self._nodes])

    @cached_property
    def after(self) -> Ragged:
        return Ragged.of([node.after for node in self._nodes])

    @cached_property
    def maker_of(self) -> Ints:
        """For each value up to the last that is made, the node that makes it; -1 if none does."""
        maker_of = np.full(self.writes.items.max(initial=-1) + 1, -1)
        maker_of[self.writes.items] = self.writes.row_of
        return maker_of

    @cached_property
    def makers_one_by_one(self) -> array[int]:
        """``maker_of``, from which single numbers are read faster."""
        return array("q", self.maker_of.tobytes())

    @cached_property
    def makers(self) -> Ints:
        """For each item of ``reads``, the node that makes the value; -1 if none does."""
        read = np.minimum(self.reads.items, len(self.maker_of))
        makers: Ints = np.append(self.maker_of, -1)[read]
        return makers

    @cached_property
    def followers(self) -> Ragged:
        """The nodes that wait for each node, in ascending order."""
        count, made = len(self.reads), self.makers >= 0
        before = np.concatenate((self.makers[made], self.after.items))
        number = np.concatenate((self.reads.row_of[made], self.after.row_of))
        edges = distinct(before * count + number)
        return Ragged.grouped(edges // count, edges % count, count)

    @cached_property
    def waiting(self) -> Ints:
        """The number of nodes that each node waits for."""
        return np.bincount(self.followers.items, minlength=len(self.reads))

    @cached_property
    def order(self) -> Ints:
        """All nodes, each after those that it waits for; without the nodes of cycles, and those
        that wait for them."""
        left, starts = self.waiting.tolist(), self.followers.starts.tolist()
        followers = self.followers.items.tolist()
        order: list[int] = np.flatnonzero(self.waiting == 0).tolist()
        for number in order:
            for following in followers[starts[number] : starts[number + 1]]:
                left[following] -= 1
                if left[following] == 0:
                    order.append(following)
        return np.array(order, np.int64)
