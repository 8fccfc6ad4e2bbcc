"""Every value that a group reads and another makes is sent: one Transfer a value and group.

F PP[0] @0 ──v──▶ F PP[1] @1        F PP[0] @0 ─v─▶ send 0->1 ─received(v)─▶ F PP[1] @1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from piper.errors import DirectiveError
from piper.ir.dag import Dag, Transfer, same_group
from piper.ir.facts import Model
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
            if maker is None or same_group(dag.nodes[maker].devices, node.devices):
                reads.append(value)
                continue
            key = (value, id(node.devices))
            if key not in received:
                received[key] = _send(dag, out, value, maker, number)
            reads.append(received[key])
        if tuple(reads) != node.reads:
            out.nodes[number] = replace(node, reads=tuple(reads))
    return out.dag()


def refuse_undivided(dag: Dag, models: Mapping[int, Model]) -> None:
    """A value that goes between groups of different size must have the batch as its rows."""
    seen: set[tuple[int, int, int]] = set()
    for number, node in enumerate(dag.nodes):
        if not isinstance(node.op, Transfer):
            continue
        source, target = len(node.op.source), len(node.op.target)
        value = dag.table.value(node.reads[0])[0].of
        if source == target or (value, source, target) in seen:
            continue
        seen.add((value, source, target))
        here, there = (models.get(n, dag.model).values[value] for n in (source, target))
        rows = (here.shape or (0,))[0] * source == (there.shape or (0,))[0] * target
        if not here.shape or not rows or here.shape[1:] != there.shape[1:]:
            raise DirectiveError(
                f"{name_of(dag, number)}: the value {here.name} has shape {list(here.shape)} on "
                f"each of {source} devices and {list(there.shape)} on each of {target}: it is not "
                "divided by rows of the batch and cannot go between groups of different size; "
                f"give both regions groups of one size ({dag.history[node.made_by]})"
            )


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
        tags=dag.nodes[maker].tags,
        devices=tuple(dict.fromkeys((*source, *target))),
        stream=dag.nodes[maker].sends.stream,
        reads=(value,),
        writes=(arrived,),
        made_by=dag.nodes[maker].sends.made_by,
    )
    return arrived
