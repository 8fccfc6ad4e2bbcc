"""Sums the gradients of a tied parameter within each microbatch, if its chunks share devices.

B head MB[0] ─dw─▶ Σ                 B head MB[0] ─dw─▶ B embed MB[0] ─dw─▶ Σ
B embed MB[0] ─dw─▶ Σ                (adds what it gets to its own)

A single device sums in this order, so results are bitwise equal. The reduction sums the gradients
of chunks on different devices, and gradients of which only some are partial sums along an axis.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from msgspec import structs

from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.values import Role
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.ops import Compute, Group


def tie_gradients(dag: Dag) -> Dag:
    """``dag`` in which the gradients of a tied parameter go from its last user to its first,
    within each microbatch and group."""
    users = dag.table.ties
    if not users:
        return dag
    groups: EqualNumbers[Group] = EqualNumbers()
    makers: defaultdict[tuple[object, ...], dict[int, tuple[int, int]]] = defaultdict(dict)
    for number, node in enumerate(dag.nodes):
        if isinstance(node.op, Compute) and node.op.chunk in users:
            for value in node.writes:
                if value < dag.first_extra:
                    template, microbatch = dag.table.value(value)
                    if template.role is Role.TIED_GRADIENT:
                        segments = dag.model.chunks[node.op.chunk].segments
                        partial = tuple(s.axis for s in segments if s.sharded)
                        group = groups.of(node.devices), node.replicas, partial
                        key = (users[node.op.chunk], microbatch, *group)
                        makers[key][node.op.chunk] = (number, value)
    changed: dict[int, Node] = {}
    for row in makers.values():
        chunks = sorted(row, reverse=True)
        for later, earlier in itertools.pairwise(chunks):
            number, _ = row[earlier]
            node = changed.get(number, dag.nodes[number])
            changed[number] = structs.replace(node, reads=(*node.reads, row[later][1]))
    return dag.with_nodes(changed)
