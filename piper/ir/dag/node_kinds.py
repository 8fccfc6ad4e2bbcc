"""What the nodes of a DAG do, and their kinds: nodes of one kind differ only in their microbatch.

A kind is what a node's duration, streams, sizes and slots depend on. So passes over a lowered DAG
ask for these once per kind, and a step of many microbatches costs little more than their nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from piper.ir.dag.edges import Edges, Wired
from piper.ir.dag.ragged import Bools, Ints, Ragged, numbered
from piper.ir.dag.values import Content, Extra
from piper.ir.ops import Add, Collective, Compute, Group, Op, Select, Transfer
from piper.ir.passes import Pass

_NUMBERS = {which: number for number, which in enumerate(Pass)}
_OTHER = Compute(-1, Pass.F, 0)


def _none() -> Ints:
    return np.empty(0, np.int64)


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


@dataclass(frozen=True, eq=False)
class Operations:
    """What nodes do and where, as arrays over all of them."""

    chunks: Ints = field(default_factory=_none)
    """Of passes; -1 for other nodes."""
    passes: Ints = field(default_factory=_none)
    """Numbers of their passes."""
    microbatches: Ints = field(default_factory=_none)
    places: Ints = field(default_factory=_none)
    """Indices in ``groups``."""
    groups: tuple[tuple[Group, int], ...] = ()
    """Groups of devices with their replicas. Equal groups should be one object."""

    def followed_by(self, nodes: Sequence[PlacedNode]) -> Operations:
        """These, then those of more ``nodes``."""
        if not nodes:
            return self
        groups = [*self.groups]
        known = {(id(group), replicas): i for i, (group, replicas) in enumerate(groups)}
        places: list[int] = []
        for node in nodes:
            key = id(node.devices), node.replicas
            place = known.get(key)
            if place is None:
                place = known[key] = len(groups)
                groups.append((node.devices, node.replicas))
            places.append(place)
        ops = [node.op for node in nodes]
        passes = [op if isinstance(op, Compute) else _OTHER for op in ops]
        return Operations(
            np.append(self.chunks, [op.chunk for op in passes]),
            np.append(self.passes, [_NUMBERS[op.which] for op in passes]),
            np.append(self.microbatches, [op.microbatch for op in passes]),
            np.append(self.places, places),
            tuple(groups),
        )

    def divided(self, passes: Mapping[int, Sequence[Pass]]) -> Operations:
        """These, where some nodes, by number in ascending order, have become these passes."""
        lengths, divided = np.ones(len(self.chunks), np.int64), np.zeros(len(self.chunks), bool)
        lengths[[*passes]] = [len(row) for row in passes.values()]
        divided[[*passes]] = True
        of = np.repeat(np.arange(len(lengths)), lengths)
        numbers = self.passes[of]
        numbers[divided[of]] = [_NUMBERS[which] for row in passes.values() for which in row]
        return replace(
            self,
            chunks=self.chunks[of],
            passes=numbers,
            microbatches=self.microbatches[of],
            places=self.places[of],
        )

    def of_pass(self, chunk: int, which: Pass) -> list[int]:
        """The nodes that run a pass of a chunk, each for a microbatch."""
        row = chunk * len(Pass) + _NUMBERS[which]
        return self._by_pass.row(row) if row < len(self._by_pass) else []

    def that_run(self, which: Pass) -> list[int]:
        """The nodes that run such a pass."""
        numbers: list[int] = np.flatnonzero(
            (self.chunks >= 0) & (self.passes == _NUMBERS[which])
        ).tolist()
        return numbers

    @cached_property
    def _by_pass(self) -> Ragged:
        there = np.flatnonzero(self.chunks >= 0)
        rows = self.chunks[there] * len(Pass) + self.passes[there]
        order = np.argsort(rows, kind="stable")
        return Ragged.grouped(rows[order], there[order], int(rows.max(initial=-1)) + 1)

    @cached_property
    def users(self) -> list[int]:
        """The first pass of each chunk in each place."""
        there = np.flatnonzero(self.chunks >= 0)
        _, first = numbered(self.chunks[there] * len(self.groups) + self.places[there])
        users: list[int] = there[first].tolist()
        return users

    @cached_property
    def others(self) -> list[int]:
        """The nodes that are not passes."""
        others: list[int] = np.flatnonzero(self.chunks < 0).tolist()
        return others


class NodeKinds:
    """``of``: the kind of each node. ``examples``: the number of the first node of each kind."""

    def __init__(
        self,
        nodes: Sequence[PlacedNode],
        operations: Operations,
        edges: Edges,
        extra: Sequence[Extra],
        size: int,
        first: int,
    ) -> None:
        """``extra`` are the values from number ``first`` on; before it, each microbatch has
        ``size`` values."""
        self._edges, self._extra = edges, extra
        self._size, self._first = size, first
        names: dict[Hashable, int] = {}
        alone: list[int] = []
        what = operations.chunks * len(Pass) + operations.passes
        passes = int(what.max(initial=0)) + 1
        for number in operations.others:
            name = self._name(nodes[number])
            if name is None:
                name = number
                alone.append(number)
            what[number] = passes + names.setdefault(name, len(names))
        parts = np.array([len(group) // n for group, n in operations.groups], np.int64)
        rows = self._rows(parts[operations.places], alone, operations.chunks >= 0)
        streams: dict[str, int] = {}
        stream = np.array([streams.setdefault(node.stream, len(streams)) for node in nodes], int)
        where = operations.places * len(streams) + stream
        packed = where * (passes + len(names)) + what
        self.of, examples = numbered(packed * (rows.max(initial=0) + 1) + rows)
        self.examples: list[int] = examples.tolist()

    def _name(self, node: PlacedNode) -> Hashable | None:
        """Equal for nodes of one kind that are not passes; None if the node is alone. Equal groups
        and operations are one object in most nodes; if they are several, there are only more
        kinds."""
        op = node.op
        if isinstance(op, Transfer):
            return id(op.source), id(op.target), op.dim, op.replicas, op.counts
        if isinstance(op, Add):
            return Add, op.value, op.chunk
        if isinstance(op, Collective | Select):
            at = node.writes[0] - self._first
            if at < 0 or self._extra[at].content is Content.VALUE:
                return type(op), id(op)
        return None

    def _rows(self, parts: Ints, alone: list[int], passes: Bools) -> Ints:
        """Equal for nodes that read and write the same forms of values, where their kind depends on
        these: a value without its microbatch, and the number of devices that shard its rows."""
        reads, writes = self._edges.reads, self._edges.writes
        templates = np.arange(self._first + len(self._extra))
        templates[: self._first] %= max(1, self._size)
        templates[self._first :] = self._of_extra()
        forms = templates * (parts.max(initial=0) + 1)
        forms[writes.items] += parts[writes.row_of]
        read, written = np.ones((2, len(parts)), bool)
        read[passes] = read[alone] = written[alone] = False
        kept = written[writes.row_of]
        written[passes] = False
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
