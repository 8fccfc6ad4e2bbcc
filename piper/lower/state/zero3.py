"""ZeRO-3: gathers the whole parameters of a bucket before their use, and frees them after it.

Consecutive uses on a device, with no use of another bucket in between, share one gather. So do the
uses of one stage for many consecutive microbatches on a device with several stages, as in
breadth-first schedules: the device then holds the buckets of that stage and of no other. A gather
may begin when the pass ``ahead`` passes before its first use is done: one bucket ahead, or as far
as memory allows.
"""

from __future__ import annotations

import itertools

from msgspec import structs

from piper.ir.dag.dag import Dag
from piper.ir.dag.values import Content, Extra
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.grouped import grouped
from piper.ir.layouts import BucketLayouts
from piper.ir.ops import Collective, Compute, Group
from piper.ir.passes import Pass
from piper.ir.plan.issue_order import IssueOrder
from piper.lower.communication.redistribute import redistribute
from piper.lower.rewriter import Rewriter

AHEAD = 2


def add_gathers(dag: Dag, order: IssueOrder, ahead: int = AHEAD, *, stages: bool = True) -> Dag:
    """``dag`` with a gather for every run of uses in ``order``. Each may begin when the pass
    ``ahead`` passes before the first use is done. Without ``stages``, no bucket is held while
    another is used."""
    buckets = _divided(dag)
    if not buckets:
        return dag
    out = Rewriter(dag)
    gathers = _Gathers(dag)
    groups: EqualNumbers[Group] = EqualNumbers()
    passes = (n for n in order.order if isinstance(dag.nodes[n].op, Compute))
    for row in grouped((groups.of(dag.nodes[n].devices), n) for n in passes).values():
        if any(_uses(dag, number, buckets) for number in row):
            _keep_order(out, row)  # the gathers are correct only for this order of passes
        uses = [(place, _uses(dag, number, buckets)) for place, number in enumerate(row)]
        uses = [(place, used) for place, used in uses if used]  # a loss does not end a run
        forward = [dag.nodes[row[place]].compute.which is Pass.F for place, _ in uses]
        again = _used_again([used for _, used in uses], forward) if stages else set()
        held: dict[int, int] = {}
        for i, (place, used) in enumerate(uses):
            held = {b: whole for b, whole in held.items() if b in used or (i, b) in again}
            for bucket in used:
                if bucket not in held:
                    before = row[place - ahead] if place >= ahead else None
                    held[bucket] = _gather(dag, out, bucket, row[place], before, gathers)
            node = out.nodes[row[place]]
            mine = (held[bucket] for bucket in used)
            out.nodes[row[place]] = structs.replace(node, reads=(*node.reads, *mine))
    return out.dag()


def _used_again(uses: list[list[int]], forward: list[bool]) -> set[tuple[int, int]]:
    """Pairs of an index in ``uses`` and another bucket that is held there for a later use: only
    forwards, or only backwards, are in between, and they do not use all buckets of that kind."""
    everything: dict[bool, set[int]] = {True: set(), False: set()}
    for used, ahead in zip(uses, forward, strict=True):
        everything[ahead].update(used)
    held: set[tuple[int, int]] = set()
    for first, used in enumerate(uses):
        for bucket in used:
            between = {bucket}
            for i in range(first + 1, len(uses)):
                if forward[i] is not forward[first] or between == everything[forward[first]]:
                    break
                if bucket in uses[i]:
                    held.update((j, bucket) for j in range(first + 1, i))
                    break
                between.update(uses[i])
    return held


def _keep_order(out: Rewriter, row: list[int]) -> None:
    for before, number in itertools.pairwise(row):
        node = out.nodes[number]
        if before not in node.after:
            out.nodes[number] = structs.replace(
                node, after=(*node.after, before), after_by=(*node.after_by, node.made_by)
            )


def _divided(dag: Dag) -> dict[str, int]:
    """For each ZeRO-3 parameter, its bucket."""
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


class _Gathers:
    """The all_gather of a bucket among the devices of a group."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self._known: dict[tuple[int, int], Collective] = {}
        self._groups: EqualNumbers[Group] = EqualNumbers()

    def of(self, bucket: int, devices: Group) -> Collective:
        key = bucket, self._groups.of(devices)
        if key not in self._known:
            layouts = BucketLayouts(self._dag.buckets[bucket])
            (every,) = redistribute(layouts.at_rest, layouts.in_use)
            members = frozenset(devices)
            mine = tuple(group for group in every.groups if members.issuperset(group))
            self._known[key] = structs.replace(every, groups=mine)
        return self._known[key]


def _gather(
    dag: Dag, out: Rewriter, bucket: int, number: int, before: int | None, gathers: _Gathers
) -> int:
    devices = dag.nodes[number].devices
    rule = dag.buckets[bucket].rule
    gather = gathers.of(bucket, devices)
    return out.add(
        gather,
        out.value(Extra(Content.PARAMETERS, bucket, gather.after)),
        tags=dag.nodes[number].tags,
        devices=devices,
        stream=rule.gather_stream,
        after=() if before is None else (before,),
        made_by=rule.made_by,
    )
