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


def add_transfers(dag: Dag, models: Mapping[int, Model]) -> Dag:
    """``dag`` with every edge between groups cut by a Transfer; all nodes must be placed.
    ``models`` are the model's facts at the shapes of each size of group."""
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
                received[key] = _send(dag, models, out, value, maker, number)
            reads.append(received[key])
        if tuple(reads) != node.reads:
            out.nodes[number] = replace(node, reads=tuple(reads))
    return out.dag()


def _send(
    dag: Dag, models: Mapping[int, Model], out: Rewriter, value: int, maker: int, reader: int
) -> int:
    source, target = dag.nodes[maker].devices, dag.nodes[reader].devices
    sends = dag.nodes[maker].sends
    dim = 0
    if len(source) != len(target):
        here, there = (
            models.get(len(group), dag.model).values[dag.table.value(value)[0].of]
            for group in (source, target)
        )
        found = _divided(here.shape, there.shape, len(source), len(target))
        edge = (
            f"{name_of(dag, maker)} on {list(source)} feeds {name_of(dag, reader)} on "
            f"{list(target)}"
        )
        places = f"{dag.history[sends.made_by]}, {dag.history[dag.nodes[reader].sends.made_by]}"
        if found is None:
            raise DirectiveError(
                f"{edge}: the value {here.name} has shape {list(here.shape)} on each of "
                f"{len(source)} devices and {list(there.shape)} on each of {len(target)}: it is "
                "not divided by rows of the batch and cannot go between groups of different size; "
                f"give both regions groups of one size ({places})"
            )
        if here.scrambled or there.scrambled:
            raise DirectiveError(
                f"{edge}: the rows of the batch do not lie one after another in the value "
                f"{here.name}, of shape {list(here.shape)} (transposed and then flattened, for "
                "example), so that groups of different size cannot divide it anew: let it cross "
                "with the batch as the outermost dimension, or give both regions groups of one "
                f"size ({places})"
            )
        dim = found
    arrived = out.value(ExtraRole.RECEIVED, value, target)
    out.add(
        Transfer(source, target, dim),
        tags=dag.nodes[maker].tags,
        devices=tuple(dict.fromkeys((*source, *target))),
        stream=sends.stream,
        reads=(value,),
        writes=(arrived,),
        made_by=sends.made_by,
    )
    return arrived


def _divided(here: tuple[int, ...], there: tuple[int, ...], source: int, target: int) -> int | None:
    """The dimension along which a value with these shapes on each of ``source`` and of ``target``
    devices is divided: the only one in which they differ, and have as much in all."""
    if len(here) != len(there):
        return None
    other = [d for d, (a, b) in enumerate(zip(here, there, strict=True)) if a != b]
    if len(other) != 1 or here[other[0]] * source != there[other[0]] * target:
        return None
    return other[0]
