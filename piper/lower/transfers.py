"""Every value that a group reads and another makes is sent: one Transfer a value and group.

F PP[0] @0 ──v──▶ F PP[1] @1        F PP[0] @0 ─v─▶ send 0->1 ─received(v)─▶ F PP[1] @1
"""

from __future__ import annotations

from dataclasses import replace

from piper.errors import DirectiveError
from piper.ir.dag import Dag, Transfer
from piper.ir.text import name_of
from piper.ir.values import ExtraRole
from piper.lower.rewriter import Rewriter


def add_transfers(dag: Dag) -> Dag:
    """``dag`` with every edge between groups cut by a Transfer; all nodes must be placed."""
    for number, node in enumerate(dag.nodes):
        if not node.devices:
            raise DirectiveError(
                f"{name_of(dag, number)} is not placed on any device: add a place that matches it"
            )
    out = Rewriter(dag)
    received: dict[tuple[int, int], int] = {}  # by value and identity of the group
    for number, node in enumerate(dag.nodes):
        reads = []
        for value in node.reads:
            maker = dag.producers.get(value)
            if maker is None or dag.nodes[maker].devices == node.devices:
                reads.append(value)
                continue
            key = (value, id(node.devices))
            if key not in received:
                received[key] = _send(dag, out, value, maker, number)
            reads.append(received[key])
        if tuple(reads) != node.reads:
            out.nodes[number] = replace(node, reads=tuple(reads))
    return out.dag()


def _send(dag: Dag, out: Rewriter, value: int, maker: int, reader: int) -> int:
    source, target = dag.nodes[maker].devices, dag.nodes[reader].devices
    small, large = sorted((len(source), len(target)))
    if large % small:
        raise DirectiveError(
            f"{name_of(dag, maker)} on {list(source)} feeds {name_of(dag, reader)} on "
            f"{list(target)}: a group of {len(source)} and one of {len(target)} cannot be matched; "
            f"one size must divide the other ({dag.history[dag.nodes[maker].sends.made_by]}, "
            f"{dag.history[dag.nodes[reader].sends.made_by]})"
        )
    arrived = out.value(ExtraRole.RECEIVED, value, target)
    out.add(
        Transfer(source, target),
        like=dag.nodes[maker],
        devices=tuple(dict.fromkeys((*source, *target))),
        stream=dag.nodes[maker].sends.stream,
        reads=(value,),
        writes=(arrived,),
        made_by=dag.nodes[maker].sends.made_by,
    )
    return arrived
