"""ZeRO-3: the whole parameters of a bucket are gathered before they are used, and let go after.

Uses that follow one another on a device, with no use of another bucket in between, share one
gather. A gather may begin when the pass some places before its first use is done: one bucket ahead,
or as far as memory allows.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

from piper.ir.dag import Collective, CollectiveKind, Compute, Dag, Group
from piper.ir.values import ExtraRole
from piper.lower.rewriter import Rewriter
from piper.lower.schedule import Schedule

AHEAD = 2


def add_gathers(dag: Dag, order: Schedule, ahead: int = AHEAD) -> Dag:
    """``dag`` with a gather for every run of uses, in the order in which ``order`` runs them; each
    may begin when the pass ``ahead`` places before the first use is done."""
    buckets = _divided(dag)
    if not buckets:
        return dag
    out = Rewriter(dag)
    blocks = _Blocks(dag)
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for number in order.order:
        if isinstance(dag.nodes[number].op, Compute):
            rows[id(dag.nodes[number].devices)].append(number)
    for row in rows.values():
        if any(_uses(dag, number, buckets) for number in row):
            _keep_order(out, row)  # the gathers are right for this order of passes only
        held: dict[int, int] = {}
        for place, number in enumerate(row):
            used = _uses(dag, number, buckets)
            if not used:  # a loss between the last layer's forward and backward parts no run
                continue
            held = {bucket: held[bucket] for bucket in used if bucket in held}
            for bucket in used:
                if bucket not in held:
                    before = row[place - ahead] if place >= ahead else None
                    held[bucket] = _gather(dag, out, bucket, number, before, blocks)
            node = out.nodes[number]
            out.nodes[number] = replace(node, reads=(*node.reads, *held.values()))
    return out.dag()


def _keep_order(out: Rewriter, row: list[int]) -> None:
    for before, number in itertools.pairwise(row):
        node = out.nodes[number]
        if before not in node.after:
            out.nodes[number] = replace(
                node, after=(*node.after, before), after_by=(*node.after_by, node.made_by)
            )


def _divided(dag: Dag) -> dict[str, int]:
    """For each parameter that is kept divided, its bucket."""
    return {
        name: index
        for index, bucket in enumerate(dag.buckets)
        if bucket.level == 3
        for name in bucket.parameters
    }


def _uses(dag: Dag, number: int, buckets: dict[str, int]) -> list[int]:
    op = dag.nodes[number].compute
    chunk = dag.model.chunks[op.chunk]
    facts = chunk.variants[dag.policy(op.chunk)].passes[op.which]
    if not facts.uses_parameters:
        return []
    return list(dict.fromkeys(buckets[name] for name in chunk.parameters if name in buckets))


class _Blocks:
    """Who divides a copy of a bucket, among the devices of a group."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self._known: dict[tuple[int, int], tuple[Group, ...]] = {}

    def of(self, bucket: int, devices: Group) -> tuple[Group, ...]:
        key = bucket, id(devices)
        if key not in self._known:
            members = frozenset(devices)
            blocks = self._dag.buckets[bucket].blocks
            self._known[key] = tuple(block for block in blocks if members.issuperset(block))
        return self._known[key]


def _gather(
    dag: Dag, out: Rewriter, bucket: int, number: int, before: int | None, blocks: _Blocks
) -> int:
    devices = dag.nodes[number].devices
    whole = out.value(ExtraRole.GATHERED, bucket, devices)
    rule = dag.buckets[bucket].rule
    made = out.add(
        Collective(CollectiveKind.ALL_GATHER, blocks.of(bucket, devices)),
        tags=dag.nodes[number].tags,
        devices=devices,
        stream=rule.gather_stream,
        reads=(),
        writes=(whole,),
        made_by=rule.made_by,
    )
    if before is not None:
        out.nodes[made] = replace(out.nodes[made], after=(before,), after_by=(rule.made_by,))
    return whole
