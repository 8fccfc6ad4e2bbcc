"""Rows sorted by expert, between groups of devices of different size.

2 devices   [ a a b c d d | a b b b c d ]      sort their rows, each its own
3 devices   [ a a b c | d d a b | b b c d ]    have the experts: the second gets two sorted ranges

Rows go between groups as all others do: each device gets a range of them, of a size that does not
depend on the data, and gives back the same range. A range of sorted rows is sorted. Where a device
gets several (runs), it merges them when it dispatches them and undoes that when it combines.
Everybody else must have the rows as they were sorted: in as many parts as where that was done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, Node, name_of
from piper.ir.dag.facts import Model
from piper.ir.dag.values import Role, Value
from piper.ir.ops import Collective, Compute
from piper.ir.overlaps import most_overlaps


def brought_in_turn(dag: Dag, node: Node) -> int | None:
    """Of an all_to_all that finds its counts in its turn, the node by which its own stream brings
    them before."""
    if not isinstance(node.op, Collective) or not node.op.in_turn:
        return None
    brings = dag.producers[node.reads[-1]]
    return brings if dag.nodes[brings].stream == node.stream else None


class SortedValues:
    """The values that are rows sorted by expert, or counts of them."""

    def __init__(self, dag: Dag, models: Mapping[int, Model]) -> None:
        self._dag = dag
        self._models = models
        self._experts: defaultdict[int, set[int]] = defaultdict(set)
        """By value of the model, the chunks of experts that take or make it."""
        self._makers = {v: chunk.index for chunk in dag.model.chunks for v in chunk.outputs}
        for chunk in dag.model.chunks:
            for value in (*chunk.inputs, *chunk.outputs) if chunk.sorted_rows else ():
                self._experts[value].add(chunk.index)

    def counts(self, chunk: int, microbatch: int) -> int:
        """The number of the value that says how many rows each expert of a chunk has."""
        facts = self._dag.model.chunks[chunk]
        assert facts.sorted_rows is not None
        wanted = facts.inputs[facts.sorted_rows.counts]
        value = Value(Role.ACTIVATION, wanted, self._makers[wanted])
        return self._dag.table.number(value, microbatch)

    def parts(self, chunk: int, microbatch: int) -> int:
        """Over how many devices the rows of a chunk of experts are divided where they are
        sorted."""
        made = self._dag.producers[self.counts(chunk, microbatch)]
        return self._dag.nodes[made].parts

    def runs(self, node: Node) -> int:
        """Of how many sorted ranges the rows of a device are that computes experts, at most."""
        op = node.compute
        return most_overlaps(node.parts, self.parts(op.chunk, op.microbatch))

    def resized(self, value: int, maker: int, reader: int) -> bool:
        """Whether ``value`` is rows sorted by expert; refuses those that would be read in other
        parts than they were sorted in."""
        dag = self._dag
        found, microbatch = dag.table.value(dag.plain(value))
        if found.role not in (Role.ACTIVATION, Role.GRADIENT) or found.of not in self._experts:
            return False
        experts = self._experts[found.of]
        parts = self.parts(min(experts), microbatch)
        for number in (maker, reader):
            node = dag.nodes[number]
            op = node.op
            if isinstance(op, Compute) and op.chunk not in experts and node.parts != parts:
                made, read = dag.nodes[maker], dag.nodes[reader]
                raise DirectiveError(
                    f"{name_of(dag, maker)} on {list(made.devices)} feeds {name_of(dag, reader)} "
                    f"on {list(read.devices)}: the rows of {dag.model.values[found.of].name} are "
                    f"sorted by expert on groups of {parts}, and only experts can take them in "
                    "other parts; place what sorts rows and what combines them on groups of one "
                    f"size ({dag.history[made.sends.made_by]}, {dag.history[read.sends.made_by]})"
                )
        return True

    def counted(self, value: int, reader: int) -> tuple[int, int] | None:
        """Of counts that experts read: how many rows each device has of which they are, and how
        many counts the reader gets."""
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
