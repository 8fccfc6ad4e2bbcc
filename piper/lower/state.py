"""Parameters in buckets: their gradients summed over all holders, updated, gathered again.

    zero=0   B … B ─▶ all_reduce ─▶ update                       at the end of the step
    zero=1   B … B ─▶ reduce_scatter ─▶ update ─▶ all_gather
    zero=2   B ─▶ reduce_scatter, every microbatch … ─▶ update ─▶ all_gather
    zero=3   the same without the last gather: gathers.py gathers before each use

Every trained parameter is in exactly one bucket, and every gradient of it enters one reduction.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from piper.capture.program import Pass
from piper.errors import DirectiveError
from piper.ir.dag import (
    Bucket,
    Collective,
    CollectiveKind,
    Compute,
    Dag,
    Group,
    StateRule,
    Update,
)
from piper.ir.facts import Model
from piper.ir.values import ExtraRole, Role, Value, parameters_of
from piper.lower.rewriter import Rewriter

DEFAULT = StateRule(0, 25 * 1024 * 1024, "reduce", "gather", 0)


@dataclass(frozen=True, slots=True)
class _Held:
    """What parameters must have in common to share a bucket."""

    groups: tuple[Group, ...]
    rule: StateRule
    ways: int
    dim: int
    trained: bool
    dtype: torch.dtype
    gradient: torch.dtype

    def bucket(self, parameters: list[str], model: Model) -> Bucket:
        sizes = [math.prod(model.parameters[name].shape) for name in parameters]
        return Bucket(
            parameters=tuple(parameters),
            groups=self.groups,
            elements=sum(sizes) // self.ways,
            rule=self.rule,
            ways=self.ways,
            dim=self.dim,
            trained=self.trained,
            dtype=self.dtype,
            gradient=self.gradient,
        )


def add_state(dag: Dag, known: tuple[Bucket, ...] = ()) -> Dag:
    """``dag`` with its buckets, and the reductions, updates and final gathers of each. ``known``
    buckets come first, as they are."""
    dag = replace(dag, buckets=(*known, *_buckets(dag, known)))
    out = Rewriter(dag)
    contributions = _contributions(dag)
    input_passes = _input_passes(dag)
    for index, bucket in enumerate(dag.buckets):
        users = _users(dag, bucket)
        gradients = [v for value in _gradients(dag, bucket, users) for v in contributions[value]]
        if gradients:
            uses = [n for chunk in users for n in input_passes.get(chunk, ())]
            uses += [n for n in _detached_uses(dag, bucket) if n not in uses]
            _update(dag, out, index, bucket, gradients, tuple(uses))
    return out.dag()


def _buckets(dag: Dag, known: tuple[Bucket, ...]) -> Iterable[Bucket]:
    """Consecutive parameters with the same holders and rule, up to the bucket's size."""
    done = {name for bucket in known for name in bucket.parameters}
    open_: dict[_Held, list[str]] = {}
    sizes: dict[_Held, int] = {}
    for name, held in _holders(dag).items():
        if name in done:
            continue
        if known:  # the step that is known trains none of these
            held = replace(held, trained=False)
        nbytes = dag.model.parameters[name].nbytes // held.ways
        if held in open_ and sizes[held] + nbytes > held.rule.bucket_bytes:
            yield held.bucket(open_.pop(held), dag.model)
            sizes.pop(held)
        open_.setdefault(held, []).append(name)
        sizes[held] = sizes.get(held, 0) + nbytes
    for held, names in open_.items():
        yield held.bucket(names, dag.model)


def _holders(dag: Dag) -> dict[str, _Held]:
    """For each parameter, the groups of devices with equal copies, and the rule for its state."""
    devices: dict[str, None] = {}
    places: defaultdict[str, set[Group]] = defaultdict(set)
    ways: dict[str, tuple[int, int]] = {}
    rules: dict[str, StateRule] = {}
    seen: set[tuple[int, int]] = set()
    for node in dag.nodes:
        if not isinstance(node.op, Compute):
            continue
        chunk = node.op.chunk
        shard = dag.shards.get(chunk)
        if (chunk, id(node.devices)) in seen:
            continue
        seen.add((chunk, id(node.devices)))
        for name in dag.model.chunks[chunk].parameters:
            devices[name] = None
            places[name].add(node.devices)
            ways[name] = (shard.ways, shard.dim) if shard else (1, 0)
            rules[name] = dag.state.get(chunk, rules.get(name, DEFAULT))
    found = {}
    copies: dict[tuple[object, ...], tuple[Group, ...]] = {}
    for name in devices:
        if rules[name].zero == 3 and len(places[name]) > 1:
            raise DirectiveError(
                f"the parameter {name!r} is held by several groups of devices "
                f"({', '.join(str(list(g)) for g in sorted(places[name]))}) and cannot be divided "
                "with zero=3: replicate its regions with a lower level"
            )
        parts, dim = ways[name]
        key = (parts, *sorted(map(id, places[name])))  # groups are shared objects
        if key not in copies:
            copies[key] = _equal_copies(name, sorted(places[name], key=min), parts)
        groups = copies[key]
        facts = dag.model.parameters[name]
        found[name] = _Held(
            groups, rules[name], parts, dim, facts.trained, facts.dtype, facts.gradient
        )
    return found


def _equal_copies(name: str, places: list[Group], ways: int) -> tuple[Group, ...]:
    """The devices that hold each part of a parameter that is divided ``ways`` ways."""
    parts: dict[int, int] = {}
    for group in places:
        for rank, device in enumerate(group):
            if parts.setdefault(device, rank % ways) != rank % ways:
                raise DirectiveError(
                    f"device {device} would hold two parts of {name!r}: its groups "
                    f"({', '.join(str(list(g)) for g in places)}) must agree on who holds which "
                    "experts; list the devices in the same order in every place"
                )
    holders: list[list[int]] = [[] for _ in range(ways)]
    for device, part in parts.items():
        holders[part].append(device)
    if len({len(group) for group in holders}) > 1:
        raise DirectiveError(
            f"the parts of {name!r} would be held by different numbers of devices "
            f"({', '.join(str(group) for group in holders)}): place its regions so that every part "
            "has as many holders (place, shard)"
        )
    return tuple(map(tuple, holders))


def _contributions(dag: Dag) -> dict[Value, list[int]]:
    """The gradients of each chunk's parameters, microbatch by microbatch; those that another pass
    takes into its own are not among them."""
    found: defaultdict[Value, list[int]] = defaultdict(list)
    taken = {v for node in dag.nodes if isinstance(node.op, Compute) for v in node.reads}
    for node in dag.nodes:
        for value in node.writes:
            if value < dag.first_extra and value not in taken:
                template, _ = dag.table.value(value)
                if template.role in (Role.PARAMETER_GRADIENT, Role.TIED_GRADIENT):
                    found[template].append(value)
    for values in found.values():
        values.sort()
    return found


def _gradients(dag: Dag, bucket: Bucket, users: list[int]) -> Iterable[Value]:
    """The values that hold gradients of a bucket's parameters."""
    for index in users:
        own, tied = parameters_of(dag.model, dag.model.chunks[index], dag.table.ties)
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
    devices = tuple(dict.fromkeys(d for group in bucket.groups for d in group))
    alone = len(bucket.groups[0]) == 1
    batches = [gradients]
    if rule.zero >= 2 and not alone:
        by_microbatch: defaultdict[int, list[int]] = defaultdict(list)
        for value in gradients:
            by_microbatch[dag.table.value(value)[1]].append(value)
        batches = list(by_microbatch.values())
    kind = CollectiveKind.REDUCE_SCATTER if rule.zero else CollectiveKind.ALL_REDUCE
    reduced: list[int] = []
    for values in batches:
        if alone:
            reduced.extend(values)
            continue
        total = out.value(ExtraRole.REDUCED, index, devices)
        microbatch = dag.nodes[dag.producers[values[0]]].tags if rule.zero >= 2 else {}
        out.add(
            Collective(kind, bucket.groups),
            tags=microbatch,
            devices=devices,
            stream=rule.reduce_stream,
            reads=tuple(values),
            writes=(total,),
            made_by=rule.made_by,
        )
        reduced.append(total)
    done = out.value(ExtraRole.UPDATED, index, devices)
    update = out.add(
        Update(index),
        tags={},
        devices=devices,
        stream="compute",
        reads=tuple(reduced),
        writes=(done,),
        made_by=rule.made_by,
    )
    by = (rule.made_by,) * len(uses)
    out.nodes[update] = replace(out.nodes[update], after=uses, after_by=by)
    if rule.zero in (1, 2) and not alone:
        out.add(
            Collective(CollectiveKind.ALL_GATHER, bucket.groups),
            tags={},
            devices=devices,
            stream=rule.gather_stream,
            reads=(done,),
            writes=(out.value(ExtraRole.GATHERED, index, devices),),
            made_by=rule.made_by,
        )


def _detached_uses(dag: Dag, bucket: Bucket) -> list[int]:
    """The backwards of chunks that read a parameter of the bucket and make no gradient of it."""
    chunks = {
        chunk.index
        for chunk in dag.model.chunks
        if not set(bucket.parameters).isdisjoint(chunk.detached)
    }
    return [
        number
        for number, node in enumerate(dag.nodes)
        if chunks
        and isinstance(node.op, Compute)
        and node.op.chunk in chunks
        and node.op.which is not Pass.F
    ]


def _input_passes(dag: Dag) -> dict[int, list[int]]:
    """For each chunk, its BI passes: they read parameters, and no gradient of these need wait for
    them."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(dag.nodes):
        if isinstance(node.op, Compute) and node.op.which is Pass.BI:
            found[node.op.chunk].append(number)
    return found
