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
    taken: dict[tuple[int, Group], int] = {}
    for number, node in enumerate(dag.nodes):
        rule = dag.shards.get(node.op.chunk) if isinstance(node.op, Compute) else None
        if rule is None or rule.ways == 1:
            continue
        reads = []
        for value in node.reads:
            if not _moves(dag, value):
                reads.append(value)
                continue
            key = (value, node.devices)
            if key not in taken:
                taken[key] = out.value(ExtraRole.EXCHANGED, value, node.devices)
                _exchange(out, node, rule, (value,), (taken[key],))
            reads.append(taken[key])
        writes = []
        for value in node.writes:
            if _moves(dag, value):
                partial = out.value(ExtraRole.PARTIAL, value, node.devices)
                _exchange(out, node, rule, (partial,), (value,))
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
    out: Rewriter, node: Node, rule: ShardRule, reads: tuple[int, ...], writes: tuple[int, ...]
) -> None:
    devices = node.devices
    groups = tuple(devices[i : i + rule.ways] for i in range(0, len(devices), rule.ways))
    out.add(
        Collective(CollectiveKind.ALL_TO_ALL, groups),
        like=node,
        devices=devices,
        stream=rule.stream,
        reads=reads,
        writes=writes,
        made_by=rule.made_by,
    )
