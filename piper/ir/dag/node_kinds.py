"""Kinds of nodes: the nodes of one kind differ only in their microbatch.

A kind is what a node's duration, streams, sizes and slots depend on. So passes over a lowered DAG
ask for these once per kind, and a step of many microbatches costs little more than their nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from piper.ir.dag.edges import Edges, Wired
from piper.ir.dag.ragged import Ints, first_of_each
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
        self._edges, self._extra = edges, extra
        self._size, self._first = size, first
        places: dict[tuple[Hashable, ...], int] = {}
        parts: list[int] = []
        names: dict[Hashable, int] = {}
        where: list[int] = []
        what: list[int] = []
        alone: list[int] = []
        computes: list[int] = []
        for number, node in enumerate(nodes):
            place = id(node.devices), node.replicas, node.stream
            if place not in places:
                places[place] = len(places)
                parts.append(node.parts)
            where.append(places[place])
            name = self._name(node)
            if name is None:
                name = number
                alone.append(number)
            elif isinstance(node.op, Compute):
                computes.append(number)
            what.append(names.setdefault(name, len(names)))
        parts_of = np.array(parts, np.int64)[where] if where else np.empty(0, np.int64)
        rows = self._rows(parts_of, alone, computes)
        packed = np.array(where, np.int64) * len(names) + np.array(what, np.int64)
        kinds: dict[int, int] = {}
        keys = (packed * (rows.max(initial=0) + 1) + rows).tolist()
        self.of: Ints = np.array([kinds.setdefault(key, len(kinds)) for key in keys], np.int64)
        self.examples: list[int] = first_of_each(self.of, len(kinds)).tolist()

    def _name(self, node: PlacedNode) -> Hashable | None:
        """Equal for nodes of one kind; None if the node is alone. Equal groups and operations are
        one object in most nodes; if they are several, there are only more kinds."""
        op = node.op
        if isinstance(op, Compute):
            return op.chunk, op.which
        if isinstance(op, Transfer):
            return id(op.source), id(op.target), op.dim, op.replicas, op.counts
        if isinstance(op, Add):
            return Add, op.value, op.chunk
        if isinstance(op, Collective | Select):
            at = node.writes[0] - self._first
            if at < 0 or self._extra[at].content is Content.VALUE:
                return type(op), id(op)
        return None

    def _rows(self, parts: Ints, alone: list[int], computes: list[int]) -> Ints:
        """Equal for nodes that read and write the same forms of values, where their kind depends on
        these: a value without its microbatch, and the number of devices that shard its rows."""
        reads, writes = self._edges.reads, self._edges.writes
        templates = np.arange(self._first + len(self._extra))
        templates[: self._first] %= max(1, self._size)
        templates[self._first :] = self._of_extra()
        forms = templates * (parts.max(initial=0) + 1)
        forms[writes.items] += parts[writes.row_of]
        read, written = np.ones((2, len(parts)), bool)
        read[computes] = read[alone] = written[alone] = False
        kept = written[writes.row_of]
        written[computes] = False
        kept &= written[writes.row_of] | (writes.items >= self._first)
        rows = reads.only(read[reads.row_of]).followed_by(writes.only(kept))
        there = np.flatnonzero(rows.lengths)
        tuples = rows.with_items(forms[rows.items]).take(there).tuples()
        numbers: dict[tuple[int, ...], int] = {}
        found = np.zeros(len(parts), np.int64)
        found[there] = [numbers.setdefault(row, len(numbers) + 1) for row in tuples]
        return found

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
