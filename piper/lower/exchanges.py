"""What sharded experts take and make is exchanged: an all_to_all before and after each pass.

pre ──▶ EP ──▶ post        pre ─▶ all_to_all ─▶ EP ─▶ all_to_all ─▶ post
"""

from __future__ import annotations

from dataclasses import replace

from piper.ir.dag import Collective, CollectiveKind, Compute, Dag, Group, Node, ShardRule
from piper.ir.values import ExtraRole, Role
from piper.lower.rewriter import Rewriter

_EXCHANGED = (Role.ACTIVATION, Role.GRADIENT)


def add_exchanges(dag: Dag) -> Dag:
    """``dag`` with an all_to_all for every value that a sharded chunk reads or makes."""
    out = Rewriter(dag)
    taken: dict[int, int] = {}
    made: dict[tuple[int, int], int] = {}  # by value and the chunk that makes it
    groups: dict[tuple[int, int, int], tuple[Group, ...]] = {}
    for number, node in enumerate(dag.nodes):
        rule = dag.shards.get(node.op.chunk) if isinstance(node.op, Compute) else None
        if rule is None or rule.ways == 1:
            continue
        key = (id(node.devices), rule.ways, rule.stride)
        if key not in groups:
            groups[key] = rule.shard_groups(node.devices)
        side_by_side = groups[key]
        reads = []
        for value in node.reads:
            if not _moves(dag, value):
                reads.append(value)
                continue
            own = (value, node.compute.chunk)
            if own in made:  # its own output, which its backward reads as it was made
                reads.append(made[own])
                continue
            if value not in taken:  # a value has one form on each group: received, if elsewhere
                taken[value] = out.value(ExtraRole.EXCHANGED, value, node.devices)
                _exchange(out, node, rule, side_by_side, (value,), (taken[value],))
            reads.append(taken[value])
        writes = []
        for value in node.writes:
            if _moves(dag, value):
                partial = made[value, node.compute.chunk] = out.value(
                    ExtraRole.PARTIAL, value, node.devices
                )
                _exchange(out, node, rule, side_by_side, (partial,), (value,))
                writes.append(partial)
            else:
                writes.append(value)
        out.nodes[number] = replace(node, reads=tuple(reads), writes=tuple(writes))
    return out.dag()


def _moves(dag: Dag, number: int) -> bool:
    if number >= dag.first_extra:
        number = dag.extra[number - dag.first_extra].of  # received: a form of an activation
    return dag.table.value(number)[0].role in _EXCHANGED


def _exchange(
    out: Rewriter,
    node: Node,
    rule: ShardRule,
    groups: tuple[Group, ...],
    reads: tuple[int, ...],
    writes: tuple[int, ...],
) -> None:
    out.add(
        Collective(CollectiveKind.ALL_TO_ALL, groups),
        tags=node.tags,
        devices=node.devices,
        stream=rule.stream,
        reads=reads,
        writes=writes,
        made_by=rule.made_by,
    )
