"""Sums the gradient of a value that several chunks read: one Add for each reader but the last, on
the reader's devices.

B right @2 ─g─▶ B root            B right @2 ─g─▶ send ─▶ ┌ Add @1 ┐ ─added(g)─▶ send ─▶ B root
B left  @1 ─g─▶                   B left  @1 ───────g───▶ └        ┘

The partial sum goes from the last reader to the first. A single device adds in this order, so
results are bitwise equal, and one message goes from group to group. No reader waits for the sum;
only its own term is added to it.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from piper.ir.dag.dag import Dag
from piper.ir.dag.ragged import distinct
from piper.ir.dag.values import Content, Extra, Role
from piper.ir.grouped import grouped
from piper.ir.ops import Add
from piper.lower.rewriter import Rewriter


def add_up(dag: Dag) -> Dag:
    """``dag`` in which a pass reads every gradient as one value."""
    if all(len(terms) == 1 for terms in dag.table.terms.values()):
        return dag
    out = Rewriter(dag)
    sums: dict[tuple[int, int], int] = {}
    several = [v.role is Role.GRADIENT and len(dag.table.terms[v.of]) > 1 for v in dag.table.values]
    read = dag.edges.reads
    terms = np.array(several, bool)[read.items % dag.table.size]
    for number in distinct(read.row_of[terms]).tolist():
        node = dag.nodes[number]
        reads: dict[int, None] = {}
        for value in node.reads:
            microbatch, index = divmod(value, dag.table.size)
            if several[index]:
                key = dag.table.values[index].of, microbatch
                if key not in sums:
                    sums[key] = _sum(dag, out, *key)
                value = sums[key]
            reads[value] = None
        if len(reads) < len(node.reads):
            out.nodes[number] = structs.replace(node, reads=tuple(reads))
    return out.dag()


def _sum(dag: Dag, out: Rewriter, value: int, microbatch: int) -> int:
    """The sum of all terms of the gradient of ``value``."""
    table = dag.table
    readers = grouped((x.by, table.number(x, microbatch)) for x in table.terms[value])
    (first,), *others = readers.values()
    total = first
    for chunk, terms in zip([*readers][1:], others, strict=True):
        reader = dag.source(terms[0])
        added = Extra(Content.VALUE, first, parts=reader.parts, summed=True)
        before, total = total, out.value(added)
        op = Add(value, chunk, microbatch)
        reads = before, *terms
        out.nodes.append(
            structs.replace(reader, op=op, reads=reads, writes=(total,), after=(), after_by=())
        )
    return total
