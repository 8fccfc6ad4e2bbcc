"""Rows sorted by expert, sent between groups of devices of different size.

2 devices   [ a a b c d d | a b b b c d ]      sort their rows, each its own
3 devices   [ a a b c | d d a b | b b c d ]    have the experts: the second gets two sorted ranges

Sorted rows go between groups like all rows: each device gets a range, whose size does not depend on
the data, and returns the same range. A range of sorted rows is sorted. A device that gets several
ranges (runs) merges them at the dispatch and undoes the merge at the combine. All other regions
must have the rows as sorted: in as many parts as the region that sorted them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, Node, name_of
from piper.ir.dag.facts import Model
from piper.ir.dag.ragged import Bools, Ints
from piper.ir.dag.values import MOVED, Role, Value
from piper.ir.ops import Collective, Compute
from piper.ir.overlaps import most_overlaps


def brought_in_turn(dag: Dag, node: Node) -> int | None:
    """For an all-to-all that reads its row counts when its turn comes, the node on its own stream
    that delivers them; None otherwise."""
    if not isinstance(node.op, Collective) or not node.op.in_turn:
        return None
    brings = dag.maker(node.reads[-1])
    assert brings is not None
    return brings if dag.nodes[brings].stream == node.stream else None


class SortedValues:
    """The values that are rows sorted by expert, or row counts."""

    def __init__(self, dag: Dag, models: Mapping[int, Model]) -> None:
        self._dag = dag
        self._models = models
        self._first_extra, self._size = dag.first_extra, dag.table.size
        self._experts: defaultdict[int, set[int]] = defaultdict(set)
        """By model value, the chunks of experts that read or make it."""
        self._makers = {v: chunk.index for chunk in dag.model.chunks for v in chunk.outputs}
        for chunk in dag.model.chunks:
            for value in (*chunk.inputs, *chunk.outputs) if chunk.sorted_rows else ():
                self._experts[value].add(chunk.index)
        values = dag.model.values
        self._ordinary = [
            v.role not in MOVED or not (v.of in self._experts or values[v.of].placements)
            for v in dag.table.values
        ]

    def ordinary(self, value: int) -> bool:
        """Whether a value of the model is neither sorted nor sharded along an axis, so that devices
        with equal parts of the batch have equal parts of it."""
        return value < self._first_extra and self._ordinary[value % self._size]

    def are_ordinary(self, values: Ints) -> Bools:
        """Which of ``values`` are ordinary."""
        ordinary = np.array(self._ordinary, bool)[values % self._size]
        return ordinary & (values < self._first_extra)

    def counts(self, chunk: int, microbatch: int) -> int:
        """The number of the value with the row counts of each expert of a chunk."""
        facts = self._dag.model.chunks[chunk]
        assert facts.sorted_rows is not None
        wanted = facts.inputs[facts.sorted_rows.counts]
        value = Value(Role.ACTIVATION, wanted, self._makers[wanted])
        return self._dag.table.number(value, microbatch)

    def parts(self, chunk: int, microbatch: int) -> int:
        """The number of parts in which the rows of a chunk of experts are sorted."""
        counts = self.counts(chunk, microbatch)
        made = self._dag.source(counts)
        return made.parts * self.own(counts, made, chunk)

    def own(self, value: int, node: Node, other: int) -> int:
        """The number of devices that ``node`` shares its rows among, where each has its own rows
        for the chunk ``other``, which is not sharded along these axes."""
        op, facts = node.op, self._dag.model
        entry = self._dag.table.value(self._dag.plain(value))[0]
        if not isinstance(op, Compute) or entry.role not in MOVED:
            return 1
        there = {segment.axis for segment in facts.chunks[other].segments}
        axes = {p.axis for p in facts.values[entry.of].placements} - there
        mine = facts.chunks[op.chunk].segments
        return math.prod(segment.ways for segment in mine if segment.axis in axes)

    def runs(self, node: Node) -> int:
        """The largest number of sorted ranges in the rows of a device that computes experts."""
        op = node.compute
        return most_overlaps(node.parts, self.parts(op.chunk, op.microbatch))

    def resized(self, value: int, maker: int, reader: int) -> bool:
        """Whether ``value`` is rows sorted by expert. Refuses a maker or reader other than experts
        that has them in different parts than they were sorted in."""
        dag = self._dag
        entry, microbatch = dag.table.value(dag.plain(value))
        if entry.role not in MOVED or entry.of not in self._experts:
            return False
        experts = self._experts[entry.of]
        parts = self.parts(min(experts), microbatch)
        for number in (maker, reader):
            node = dag.nodes[number]
            op = node.op
            if not isinstance(op, Compute) or op.chunk in experts:
                continue
            if node.parts * self.own(value, node, min(experts)) != parts:
                made, read = dag.nodes[maker], dag.nodes[reader]
                raise DirectiveError(
                    f"{name_of(dag, maker)} on {list(made.devices)} feeds {name_of(dag, reader)} "
                    f"on {list(read.devices)}: the rows of {dag.model.values[entry.of].name} are "
                    f"sorted by expert on groups of {parts}, and only experts can take them in "
                    "other parts; place what sorts rows and what combines them on groups of one "
                    f"size ({dag.history[made.sends.made_by]}, {dag.history[read.sends.made_by]})"
                )
        return True

    def counted(self, value: int, reader: int) -> tuple[int, int] | None:
        """For row counts that experts read: the rows of each device that counted them, and the
        number of counts that the reader gets. None for other values."""
        dag = self._dag
        node = dag.nodes[reader]
        chunk = dag.model.chunks[node.op.chunk] if isinstance(node.op, Compute) else None
        if chunk is None or chunk.sorted_rows is None:
            return None
        of, microbatch = dag.table.value(dag.plain(value))
        if of.of != chunk.inputs[chunk.sorted_rows.counts]:
            return None
        parts = self.parts(chunk.index, microbatch)
        there = self._models.get(parts, dag.model).chunks[chunk.index].sorted_rows
        assert there is not None
        runs = self.runs(node)
        return there.rows, there.experts if runs == 1 else runs * (there.experts + 1)
