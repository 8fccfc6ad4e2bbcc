"""Kinds of nodes: the nodes of one kind differ only in their microbatch.

A kind is what a node's duration, streams, sizes and slots depend on. So the scheduler and the plans
ask for these once per kind, and a step of many microbatches costs little more than their nodes.
"""

from __future__ import annotations

from collections.abc import Hashable

from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.values import Content
from piper.ir.ops import Add, Collective, Compute, Select, Transfer


class NodeKinds:
    """``of``: the kind of each node. ``examples``: the number of the first node of each kind."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self._size, self._first_extra = dag.table.size, dag.first_extra
        self._templates: dict[tuple[Hashable, ...], int] = {}
        self._extra: list[int] = []
        for number in range(len(dag.extra)):
            self._extra.append(self._template_of_extra(number))
        self.of: list[int] = []
        self.examples: list[int] = []
        kinds: dict[tuple[Hashable, ...], int] = {}
        for number, node in enumerate(dag.nodes):
            kind = kinds.setdefault(self._key(number, node), len(kinds))
            if kind == len(self.examples):
                self.examples.append(number)
            self.of.append(kind)

    @property
    def nodes(self) -> list[Node]:
        """The first node of each kind."""
        return [self._dag.nodes[number] for number in self.examples]

    def _key(self, number: int, node: Node) -> tuple[Hashable, ...]:
        """Equal for nodes of one kind. Equal groups and operations are one object in most nodes; if
        they are several, there are only more kinds."""
        op = node.op
        if isinstance(op, Compute):
            forms = [self._template(v) for v in node.writes if v >= self._first_extra]
            return op.chunk, op.which, id(node.devices), node.replicas, node.stream, *forms
        where = id(node.devices), node.replicas, node.stream
        if isinstance(op, Transfer):
            what: tuple[Hashable, ...] = (
                id(op.source), id(op.target), op.dim, op.replicas, op.counts,
            )  # fmt: skip
        elif isinstance(op, Add):
            what = op.value, op.chunk
        elif isinstance(op, Collective | Select) and self._of_values(node.writes[0]):
            what = (id(op),)
        else:
            return ("alone", number)
        values = [self._form(value) for value in (*node.reads, *node.writes)]
        return type(op), *where, *what, *values

    def _of_values(self, value: int) -> bool:
        at = value - self._first_extra
        return at < 0 or self._dag.extra[at].content is Content.VALUE

    def _form(self, value: int) -> tuple[int, int]:
        """A value without its microbatch, and the number of devices that shard its rows."""
        made = self._dag.producers.get(value)
        return self._template(value), 0 if made is None else self._dag.nodes[made].parts

    def _template(self, value: int) -> int:
        if value < self._first_extra:
            return value % self._size
        return self._extra[value - self._first_extra]

    def _template_of_extra(self, number: int) -> int:
        extra = self._dag.extra[number]
        of = self._template(extra.of) if extra.content is Content.VALUE else extra.of
        key = extra.content, of, extra.layout is None, extra.parts, extra.rows, extra.summed
        return self._templates.setdefault(key, self._size + len(self._templates))
