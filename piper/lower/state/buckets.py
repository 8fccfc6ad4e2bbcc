"""Puts parameters into buckets, and adds the gathers, gradient reductions and updates of each.

    zero=0   F … B ─▶ all_reduce ─▶ update
    zero=1   all_gather ─▶ F … B ─▶ reduce_scatter ─▶ update
    zero=2   all_gather ─▶ F … B ─▶ reduce_scatter, every microbatch … ─▶ update
    zero=3   the same without the gather: zero3.py gathers before each use

The next step gathers the parameters that a step updates: forwards overlap the gathers of later
layers, as backwards overlap the reductions. At the end of a step nothing would overlap them.

With several copies of sharded state (HSDP), gradients are reduce-scattered within each copy, and
all-reduced across copies once, before the update.

Every trained parameter is in exactly one bucket, and each of its gradients enters one reduction.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag, Tags
from piper.ir.dag.ragged import Ragged
from piper.ir.dag.values import PARAMETER_GRADIENTS, Content, Extra, Role, Value
from piper.ir.layouts import BucketLayouts
from piper.ir.ops import COMPUTE, Compute, Group, Op, Update
from piper.ir.passes import Pass
from piper.ir.rules import Bucket
from piper.lower.communication.redistribute import redistribute
from piper.lower.rewriter import Rewriter
from piper.lower.state.replica_groups import BucketKey, refuse_elsewhere, replica_groups_of


def add_state(dag: Dag, known: tuple[Bucket, ...] = (), tensors: Collection[str] = ()) -> Dag:
    """``dag`` with its buckets, and the gathers, reductions and updates of each. ``known`` buckets
    come first, unchanged. Parameters named in ``tensors`` are not sliced."""
    refuse_elsewhere(dag, known)
    buckets = (*known, *_buckets(dag, known, frozenset(tensors)))
    out = Rewriter(dag)
    contributions = _contributions(dag)
    for index, bucket in enumerate(buckets):
        users = _users(dag, bucket)
        if bucket.level in (1, 2):
            _gather(out, index, bucket, _passes(dag, users, Pass.F))
        gradients = [
            v for value in _gradients(dag, bucket, users) for v in contributions.get(value, ())
        ]
        if gradients:
            # these passes read parameters but make no gradients of them
            uses = _passes(dag, users, Pass.BI) + _detached_uses(dag, bucket)
            _update(dag, out, index, bucket, gradients, tuple(dict.fromkeys(uses)))
    return out.dag(buckets=buckets)


def _buckets(dag: Dag, known: tuple[Bucket, ...], tensors: Collection[str]) -> Iterable[Bucket]:
    """Buckets of consecutive parameters with equal keys, up to the bucket size. From ZeRO-2 on, a
    bucket holds parameters of one chunk.

    Buckets are filled from the last parameter. So the remainder, a smaller bucket, holds the first
    parameters, whose reduction comes last and overlaps nothing. If devices get whole tensors, a
    bucket has room for at least one per device: with fewer, most of it would be padding."""
    done = {name for bucket in known for name in bucket.parameters}
    keys = {
        name: key.fixed() if known else key  # the known training step trains none of the others
        for name, key in replica_groups_of(dag, tensors).items()
        if name not in done
    }
    filled: list[tuple[BucketKey, deque[str]]] = []
    open_: dict[BucketKey, deque[str]] = {}
    sizes: dict[BucketKey, int] = {}
    limits: defaultdict[BucketKey, int] = defaultdict(int)
    for name, key in keys.items():
        room = dag.model.parameters[name].nbytes // key.ways * key.within if key.packed else 0
        limits[key] = max(limits[key], key.limit, room)
    for name, key in reversed(keys.items()):
        nbytes = dag.model.parameters[name].nbytes // key.ways
        if key not in open_ or sizes[key] + nbytes > limits[key]:
            open_[key], sizes[key] = deque(), 0
            filled.append((key, open_[key]))
        open_[key].appendleft(name)
        sizes[key] += nbytes
    first = {name: i for i, name in enumerate(keys)}
    for key, names in sorted(filled, key=lambda bucket: first[bucket[1][0]]):
        yield key.bucket(list(names), dag.model)


def _contributions(dag: Dag) -> dict[Value, list[int]]:
    """The parameter gradients of each chunk, ordered by microbatch, without those that another pass
    adds to its own."""
    table = dag.table
    wanted = np.array([role in PARAMETER_GRADIENTS for role in table.roles], bool)
    made = dag.edges.writes.items
    made = made[made < dag.first_extra]
    made = np.sort(made[wanted[made % table.size]])
    if table.ties:
        computes = (node for node in dag.nodes if isinstance(node.op, Compute))
        taken = {v for node in computes for v in node.reads}
        made = made[[value not in taken for value in made.tolist()]]
    order = np.argsort(made % table.size, kind="stable")
    rows = Ragged.grouped(made[order] % table.size, made[order], table.size)
    return {table.values[i]: rows.row(i) for i in np.flatnonzero(rows.lengths).tolist()}


def _gradients(dag: Dag, bucket: Bucket, users: list[int]) -> Iterable[Value]:
    """The values with gradients of a bucket's parameters."""
    for index in users:
        own, tied = dag.table.parameters[index]
        if not set(bucket.parameters).isdisjoint(own):
            yield Value(Role.PARAMETER_GRADIENT, index, index)
        if not set(bucket.parameters).isdisjoint(tied):
            yield Value(Role.TIED_GRADIENT, index, index)


def _users(dag: Dag, bucket: Bucket) -> list[int]:
    names = set(bucket.parameters) if bucket.trained else set()
    return [c.index for c in dag.model.chunks if not names.isdisjoint(c.parameters)]


def _update(
    dag: Dag,
    out: Rewriter,
    index: int,
    bucket: Bucket,
    gradients: list[int],
    uses: tuple[int, ...],
) -> None:
    rule = bucket.rule
    everyone = _everyone(bucket)

    def add(
        op: Op,
        reads: Iterable[int],
        made: Extra,
        *,
        stream: str = rule.reduce_stream,
        devices: Group = everyone,
        tags: Tags | None = None,
        after: tuple[int, ...] = (),
    ) -> int:
        """Adds a node for this bucket. Returns the value it makes."""
        return out.add(
            op,
            out.value(made),
            tags=tags,
            devices=devices,
            stream=stream,
            reads=reads,
            after=after,
            made_by=rule.made_by,
        )

    reduced = gradients
    layouts = BucketLayouts(bucket)
    for op in redistribute(layouts.gradients, layouts.optimizer):
        made = Extra(Content.GRADIENTS, index, op.after)
        if op.kind is Move.REDUCE_SCATTER and bucket.level > 1:
            reduced = [
                add(
                    structs.replace(op, groups=part.shard_groups),
                    part.gradients,
                    made,
                    devices=part.devices,
                    tags=part.tags,
                )
                for part in _parts(dag, op.groups, everyone, gradients)
            ]
        else:
            reduced = [add(op, reduced, made)]
    add(Update(index), reduced, Extra(Content.SQUARES, index), stream=COMPUTE, after=uses)


def _gather(out: Rewriter, index: int, bucket: Bucket, uses: list[int]) -> None:
    """Add a gather of the parameters that the previous step updated, for all forwards that use
    them. Backwards run after their forwards, so they need no edge."""
    if not uses:
        return
    layouts = BucketLayouts(bucket)
    (gather,) = redistribute(layouts.optimizer, layouts.in_use)
    whole = out.add(
        gather,
        out.value(Extra(Content.PARAMETERS, index, gather.after)),
        devices=_everyone(bucket),
        stream=bucket.rule.gather_stream,
        made_by=bucket.rule.made_by,
    )
    for number in uses:
        node = out.nodes[number]
        out.nodes[number] = structs.replace(node, reads=(*node.reads, whole))


def _everyone(bucket: Bucket) -> Group:
    return tuple(dict.fromkeys(d for group in bucket.groups for d in group))


@dataclass(slots=True)
class _Part:
    """Gradients of one microbatch that the same devices make."""

    shard_groups: tuple[Group, ...]
    devices: Group
    tags: Tags
    gradients: list[int]


def _parts(
    dag: Dag, shard_groups: tuple[Group, ...], everyone: Group, gradients: Iterable[int]
) -> Iterable[_Part]:
    """The separate reductions: for each microbatch and set of shard groups, its gradients."""
    group_of = {device: i for i, group in enumerate(shard_groups) for device in group}
    touched: dict[int, tuple[int, ...]] = {}
    sides: dict[tuple[int, ...], tuple[tuple[Group, ...], Group]] = {
        tuple(range(len(shard_groups))): (shard_groups, everyone)
    }
    parts: dict[tuple[int, tuple[int, ...]], _Part] = {}
    for value in gradients:
        node = dag.source(value)
        if id(node.devices) not in touched:
            touched[id(node.devices)] = tuple(sorted({group_of[d] for d in node.devices}))
        side = touched[id(node.devices)]
        if side not in sides:
            chosen = tuple(shard_groups[i] for i in side)
            sides[side] = (chosen, tuple(d for group in chosen for d in group))
        key = (dag.table.value(value)[1], side)
        if key not in parts:
            parts[key] = _Part(*sides[side], node.tags, [])
        parts[key].gradients.append(value)
    return parts.values()


def _detached_uses(dag: Dag, bucket: Bucket) -> list[int]:
    """The backwards of chunks that read a parameter of the bucket but make no gradient of it."""
    parameters = set(bucket.parameters)
    chunks = [c.index for c in dag.model.chunks if not parameters.isdisjoint(c.detached)]
    return sorted(n for which in (Pass.B, Pass.BI, Pass.BW) for n in _passes(dag, chunks, which))


def _passes(dag: Dag, chunks: Iterable[int], which: Pass) -> list[int]:
    """The nodes that run a pass of ``chunks``."""
    return [number for chunk in chunks for number in dag.operations.of_pass(chunk, which)]
