"""Adds the communication of activations and their gradients, so that every region reads them in its
own layout: transfers between groups of devices, and, where a region's experts are sharded, the
all-to-all dispatch of rows to experts and the combine.

F PP[0] @0 ──v──▶ F PP[1] @1        F PP[0] @0 ─v─▶ send 0->1 ─received(v)─▶ F PP[1] @1
pre ──▶ EP ──▶ post        pre ─▶ all_to_all ─▶ EP ─▶ all_to_all ─▶ post

A value keeps its number in the layout in which its rows are sharded over the devices that made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from piper.base.errors import DirectiveError
from piper.ir.collectives import Sharded
from piper.ir.dag.dag import Dag, Node, name_of
from piper.ir.dag.facts import Model
from piper.ir.dag.values import MOVED, Content, Extra
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.ops import Collective, Compute, Group, Transfer, same_group
from piper.ir.rules import ShardRule
from piper.lower.communication.regrouped_rows import RegroupedRows
from piper.lower.communication.sorted_rows import SortedValues
from piper.lower.rewriter import Rewriter

_BY_ROWS, _BY_EXPERT = Sharded(1), Sharded(0)
"""The layouts of rows where they are made, and where their experts are."""


def add_activations(dag: Dag, models: Mapping[int, Model], *, gpu: bool = False) -> Dag:
    """``dag`` with the communication between its passes; all nodes must be placed. ``models`` holds
    the model's facts at the shapes of each number of parts. On a GPU the host would have to wait
    for row counts; if there is room for all rows, the all-to-all sends padded buffers instead."""
    if not all(group for group, _ in dag.operations.groups):
        number = next(number for number, node in enumerate(dag.nodes) if not node.devices)
        raise DirectiveError(
            f"{name_of(dag, number)} is not placed on any device: add a place that matches it"
        )
    _refuse_other_replicas(dag)
    forms = _Forms(dag, models, gpu)
    for number in forms.communicating():
        forms.connect(number)
    return forms.out.dag()


@dataclass(frozen=True, slots=True)
class _Sent:
    """The all-to-all of rows sorted by expert to the devices that hold the experts."""

    counts: int
    """The value with the number of a device's rows for each expert."""
    received: int
    """The value with the number of rows that each device sends for a device's own experts."""
    rows: int
    """Rows that a device has."""
    room: int
    """Rows that a device can receive."""
    runs: int
    """Number of sorted ranges in a device's own rows."""


class _Forms:
    """Values in the layouts in which nodes make and read them; each form is made once."""

    def __init__(self, dag: Dag, models: Mapping[int, Model], gpu: bool) -> None:
        self.out = Rewriter(dag)
        self._dag = dag
        self._models = models
        self._gpu = gpu
        self._moved = [role in MOVED for role in dag.table.roles]
        self._sorted = SortedValues(dag, models)
        self._regrouped = RegroupedRows(dag, models)
        self._groups: EqualNumbers[Group] = EqualNumbers()
        self._received: dict[tuple[int, int, int], int] = {}
        """By value, number of the group, and number of replicas in it."""
        self._joined: dict[tuple[int, int], Group] = {}
        self._dispatched: dict[int, int] = {}
        self._undivided: dict[tuple[int, int], int] = {}
        """By value and chunk, the experts' result before the combine."""
        self._all_to_alls: dict[tuple[object, ...], Collective] = {}
        self._expert_groups: dict[tuple[int, int, int], tuple[Group, ...]] = {}
        self._starts: list[int] = []
        self._other: list[bool] = []
        """For each value that nodes read, whether it is not ordinary or made elsewhere. The rows of
        node ``i`` begin at ``_starts[i]``."""

    def communicating(self) -> list[int]:
        """The nodes that compute experts, or read a value that is not ordinary or made elsewhere.
        All others read values as they are."""
        dag, edges = self._dag, self._dag.edges
        chunks, places = dag.operations.chunks, dag.operations.places
        elsewhere = places[edges.makers] != places[edges.reads.row_of]
        other = (edges.makers >= 0) & (elsewhere | ~self._sorted.are_ordinary(edges.reads.items))
        experts = {chunk.index for chunk in dag.model.chunks if chunk.sorted_rows is not None}
        experts |= dag.shards.keys()
        found = np.isin(chunks, [*experts])
        found[edges.reads.row_of[other]] = True
        self._starts, self._other = edges.reads.starts.tolist(), other.tolist()
        numbers: list[int] = np.flatnonzero(found).tolist()
        return numbers

    def connect(self, number: int) -> None:
        """Make a node read and write values in the layouts that it needs."""
        node = self._dag.nodes[number]
        rule = self._rule(node)
        start, end = self._starts[number : number + 2]
        reads = tuple(
            [
                self._read(value, number, rule)
                if other or (rule is not None and self._moves(value))
                else value
                for value, other in zip(node.reads, self._other[start:end], strict=True)
            ]
        )
        writes = node.writes
        if rule is not None:
            writes = tuple(self._made(value, number, rule) for value in writes)
        if (reads, writes) != (node.reads, node.writes):
            self.out.nodes[number] = structs.replace(node, reads=reads, writes=writes)

    def _rule(self, node: Node) -> ShardRule | None:
        """How the experts that a node computes are sharded, if they are. If they are not, but a
        device gets several sorted ranges of rows, an all-to-all of one device merges them."""
        if not isinstance(node.op, Compute):
            return None
        rule = self._dag.shards.get(node.op.chunk)
        if rule is not None and rule.ways > 1:
            return rule
        if self._dag.model.chunks[node.op.chunk].sorted_rows is None or self._sorted.runs(node) < 2:
            return None
        stream, made_by = (rule.stream, rule.made_by) if rule else ("exchange", node.sends.made_by)
        return ShardRule(1, 0, stream, made_by, node.replicas)

    def _read(self, value: int, reader: int, rule: ShardRule | None) -> int:
        node = self._dag.nodes[reader]
        maker = self._dag.maker(value)
        if maker is None:
            return value
        made = self._dag.nodes[maker]
        here = made.devices is node.devices and made.replicas == node.replicas
        if here and self._sorted.ordinary(value) and (rule is None or not self._moves(value)):
            return value
        if rule is not None and (value, node.compute.chunk) in self._undivided:
            return self._undivided[value, node.compute.chunk]  # a backward reads its own forward's
        by_expert, ours, theirs = False, made.replicas, node.replicas
        if not self._sorted.ordinary(value):
            by_expert = self._sorted.resized(value, maker, reader)
            ours, theirs = self._alike(value, made, node)
        if not same_group(made.devices, node.devices) or ours != theirs:
            key = (value, self._groups.of(node.devices), node.replicas)
            if key not in self._received:
                self._received[key] = self._send(value, maker, reader, by_expert=by_expert)
            value = self._received[key]
        if rule is None or not self._moves(value):
            return value
        if value not in self._dispatched:
            sent = self._sent(reader, rule)
            if sent is None or value == sent.counts:
                return self._dispatch(node, rule, value, sent.runs if sent else 1)
            rows = self.out.value(self._by_expert(value, node, sent.room))
            self._dispatched[value] = rows
            self._all_to_all(node, rule, value, rows, sent, sent.room)
        return self._dispatched[value]

    def _alike(self, value: int, made: Node, read: Node) -> tuple[int, int]:
        """The number of devices that have the same rows of a value, where it is made and read."""
        if not isinstance(made.op, Compute) or not isinstance(read.op, Compute):
            return made.replicas, read.replicas
        return (
            made.replicas // self._sorted.own(value, made, read.op.chunk),
            read.replicas // self._sorted.own(value, read, made.op.chunk),
        )

    def _made(self, value: int, maker: int, rule: ShardRule) -> int:
        node = self._dag.nodes[maker]
        if not self._moves(value):
            return value
        sent = self._sent(maker, rule)
        room, rows = (sent.room, sent.rows) if sent else (None, None)
        before = self.out.value(self._by_expert(value, node, room))
        self._undivided[value, node.compute.chunk] = before
        self._all_to_all(node, rule, before, value, sent, rows, back=True)
        return before

    def _by_expert(self, value: int, node: Node, room: int | None) -> Extra:
        return Extra(Content.VALUE, value, _BY_EXPERT, node.parts, room)

    def _dispatch(self, node: Node, rule: ShardRule, value: int, runs: int) -> int:
        """Send ``value`` in equal parts to the devices that hold its experts."""
        if value not in self._dispatched:
            made = self.out.value(self._by_expert(value, node, None))
            self._dispatched[value] = made
            self._all_to_all(node, rule, value, made, runs=runs)
        return self._dispatched[value]

    def _sent(self, number: int, rule: ShardRule) -> _Sent | None:
        """How a node's rows are sent by count, if they are sorted by expert."""
        node, dag = self._dag.nodes[number], self._dag
        op = node.compute
        chunk = self._models.get(node.parts, dag.model).chunks[op.chunk]
        if chunk.sorted_rows is None:
            return None
        mine = self._read(self._sorted.counts(op.chunk, op.microbatch), number, None)
        rows, runs = chunk.sorted_rows.rows, self._sorted.runs(node)
        received = self._dispatch(node, rule, mine, runs)
        return _Sent(mine, received, rows, rule.room(rows), runs)

    def _moves(self, value: int) -> bool:
        first = self._dag.first_extra
        while value >= first:
            value = self.out.extra[value - first].of  # received or added up: a form of a value
        return self._moved[value % len(self._moved)]

    def _all_to_all(
        self,
        node: Node,
        rule: ShardRule,
        value: int,
        made: int,
        sent: _Sent | None = None,
        room: int | None = None,
        runs: int = 1,
        *,
        back: bool = False,
    ) -> None:
        runs = sent.runs if sent else runs
        where = (self._groups.of(node.devices), rule.ways, rule.stride)
        if where not in self._expert_groups:
            self._expert_groups[where] = rule.mesh(node.devices).groups("ep")
        key = (where, room, runs, back)
        if key not in self._all_to_alls:
            ends = (_BY_EXPERT, _BY_ROWS) if back else (_BY_ROWS, _BY_EXPERT)
            padded = self._gpu and sent is not None and rule.capacity is None
            by_host = self._gpu and room is not None
            self._all_to_alls[key] = Collective(
                *ends, self._expert_groups[where], room, padded, by_host, runs
            )
        self.out.add(
            self._all_to_alls[key],
            made,
            tags=node.tags,
            devices=node.devices,
            replicas=node.replicas,
            stream=rule.stream,
            reads=(value,) if sent is None else (value, sent.counts, sent.received),
            made_by=rule.made_by,
        )

    def _send(self, value: int, maker: int, reader: int, *, by_expert: bool) -> int:
        made, read = self._dag.nodes[maker], self._dag.nodes[reader]
        dim, counts, rows = 0, None, None
        if made.parts != read.parts:
            counted = self._sorted.counted(value, reader) if by_expert else None
            if counted is not None:
                counts, rows = counted
            elif not by_expert:
                dim = self._regrouped.dimension(value, maker, reader)
        first = self._dag.first_extra
        summed = value >= first and self._dag.extra[value - first].summed
        return self.out.add(
            Transfer(made.devices, read.devices, dim, (made.replicas, read.replicas), counts),
            self.out.value(Extra(Content.VALUE, value, None, read.parts, rows, summed)),
            tags=made.tags,
            devices=self._both(made.devices, read.devices),
            stream=made.sends.stream,
            reads=(value,),
            made_by=made.sends.made_by,
        )

    def _both(self, source: Group, target: Group) -> Group:
        """The devices of two groups: one object for all transfers between them."""
        key = self._groups.of(source), self._groups.of(target)
        if key not in self._joined:
            self._joined[key] = tuple(dict.fromkeys((*source, *target)))
        return self._joined[key]


def _refuse_other_replicas(dag: Dag) -> None:
    """Gradients of a region accumulate over microbatches and count once for all replicas. So all
    its microbatches must have the same number of replicas."""
    first: dict[int, int] = {}
    for number in dag.operations.users:
        node = dag.nodes[number]
        other = dag.nodes[first.setdefault(node.compute.chunk, number)]
        if other.replicas != node.replicas:
            raise DirectiveError(
                f"{name_of(dag, number)} is computed identically by {node.replicas} devices each, "
                f"and other microbatches of it by {other.replicas}: leave the same number of "
                f"devices out of batch= ({dag.history[node.sends.made_by]}, "
                f"{dag.history[other.sends.made_by]})"
            )
