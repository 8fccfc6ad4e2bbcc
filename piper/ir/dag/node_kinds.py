"""Kinds of nodes: the nodes of one kind differ only in their microbatch.

A kind is what a node's duration, streams, sizes and slots depend on. So passes over a lowered DAG
ask for these once per kind, and a step of many microbatches costs little more than their nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from piper.ir.dag.edges import Edges, Wired
from piper.ir.dag.ragged import Ints, Ragged, first_of_each
from piper.ir.dag.values import Content, Extra
from piper.ir.ops import Add, Collective, Compute, Group, Op, Select, Transfer


class PlacedNode(Wired, Protocol):
    """A node, as far as its kind is concerned."""

    @property
    def op(self) -> Op: ...
    @property
    def devices(self) -> Group: ...
    @property
    def replicas(self) -> int: ...
    @property
    def stream(self) -> str: ...
    @property
    def parts(self) -> int: ...


class NodeKinds:
    """``of``: the kind of each node. ``examples``: the number of the first node of each kind."""

    def __init__(
        self,
        nodes: Sequence[PlacedNode],
        edges: Edges,
        extra: Sequence[Extra],
        size: int,
        first: int,
    ) -> None:
        """``extra`` are the values from number ``first`` on; before it, each microbatch has
        ``size`` values."""
        self._nodes, self._edges, self._extra = nodes, edges, extra
        self._size, self._first = size, first
        places: dict[tuple[Hashable, ...], int] = {}
        where = [
            places.setdefault((id(node.devices), node.replicas, node.stream), len(places))
            for node in nodes
        ]
        what = [self._what(number, node) for number, node in enumerate(nodes)]
        keys = zip(where, what, self._rows(what), strict=True)
        kinds: dict[tuple[Hashable, ...], int] = {}
        of = [kinds.setdefault(key, len(kinds)) for key in keys]
        self.of: Ints = np.array(of, np.int64)
        self.examples: list[int] = first_of_each(self.of, len(kinds)).tolist()

    def _what(self, number: int, node: PlacedNode) -> Hashable:
        """Equal for nodes of one kind. Equal groups and operations are one object in most nodes; if
        they are several, there are only more kinds. Just a number if the node is alone."""
        op = node.op
        if isinstance(op, Compute):
            return op.chunk, op.which
        if isinstance(op, Transfer):
            return id(op.source), id(op.target), op.dim, op.replicas, op.counts
        if isinstance(op, Add):
            return Add, op.value, op.chunk
        at = node.writes[0] - self._first if isinstance(op, Collective | Select) else 0
        if isinstance(op, Collective | Select) and (
            at < 0 or self._extra[at].content is Content.VALUE
        ):
            return type(op), id(op)
        return number

    def _rows(self, what: Sequence[Hashable]) -> list[tuple[int, ...]]:
        """The forms of the values that each node reads and writes, where its kind depends on them:
        a value without its microbatch, and the number of devices that shard its rows."""
        reads, writes = self._edges.reads, self._edges.writes
        parts = np.array([node.parts for node in self._nodes], np.int64)
        templates = np.arange(self._first + len(self._extra))
        templates[: self._first] %= max(1, self._size)
        templates[self._first :] = self._of_extra()
        forms = templates * (parts.max(initial=0) + 1)
        forms[writes.items] += parts[writes.row_of]
        alone = np.array([isinstance(x, int) for x in what], bool)
        computes = np.array([isinstance(node.op, Compute) for node in self._nodes], bool)
        read = ~(alone | computes)[reads.row_of]
        written = ~alone[writes.row_of]
        written &= ~computes[writes.row_of] | (writes.items >= self._first)
        rows: Ragged = reads.only(read).followed_by(writes.only(written))
        return rows.with_items(forms[rows.items]).tuples()

    def _of_extra(self) -> list[int]:
        """The value that stands for each added value in all microbatches."""
        templates: dict[tuple[Hashable, ...], int] = {}
        found: list[int] = []
        for extra in self._extra:
            of = extra.of
            if extra.content is Content.VALUE:
                of = of % self._size if of < self._first else found[of - self._first]
            key = extra.content, of, extra.layout is None, extra.parts, extra.rows, extra.summed
            found.append(templates.setdefault(key, self._size + len(templates)))
        return found
