"""Replica groups of a parameter: the devices with equal copies, and those that shard each copy.

zero=1, 2   [0 1 2 3]          one copy, sharded over all its devices
within=2    [0 1 | 2 3]        two copies, each sharded over neighbours
zero=3      [0 1 | 2 3]        the same without within=, if 0,1 and 2,3 run separate regions: the
                               devices that compute together gather a copy
            [0 1]              like zero=2, if 0 and 1 run separate regions: neither could gather
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, Node, group_text, name_of, region_of
from piper.ir.dag.facts import Model
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.grouped import grouped
from piper.ir.ops import Group
from piper.ir.rules import Bucket, ShardRule, StateRule, shard_numel
from piper.lower.state.packing import in_a_row, packed

DEFAULT = StateRule(0, 25 * 1024 * 1024, "reduce", "gather", 0)
_WHOLE = ShardRule(1, 0, "", 0)
_ALONE = 256 * 1024 * 1024
"""Bucket size in bytes for parameters without replicas: few updates keep the host's overhead low,
and the temporary memory of the optimizer is still bounded."""


@dataclass(frozen=True, slots=True)
class BucketKey:
    """The properties that parameters of one bucket have in common."""

    groups: tuple[Group, ...]
    within: int
    rule: StateRule
    ways: int
    dim: int
    trained: bool
    dtype: torch.dtype
    gradient: torch.dtype
    chunk: int | None
    """The chunk that uses them, if gradients or parameters are sharded (ZeRO-2 and 3): they come
    and go with its passes."""
    sections: tuple[int, ...] = ()
    axis: str = "ep"
    tensors: bool = False
    """Whether the optimizer needs whole tensors."""
    alike: int = 1
    """Number of neighbours in a group that make equal gradients."""

    @property
    def packed(self) -> bool:
        """Whether each device gets whole tensors instead of a slice of the bucket."""
        return self.tensors and self.within > 1

    @property
    def limit(self) -> int:
        """Largest size of a bucket in bytes, unless it holds a single parameter."""
        summed = len(self.groups[0]) > 1
        return self.rule.bucket_bytes if summed else max(self.rule.bucket_bytes, _ALONE)

    def bucket(self, parameters: list[str], model: Model) -> Bucket:
        shapes = [model.parameters[name].shape for name in parameters]
        sizes = tuple(shard_numel(shape, self.dim, self.ways) for shape in shapes)
        offsets, share = (packed if self.packed else in_a_row)(sizes, self.within)
        return Bucket(
            parameters=tuple(parameters),
            groups=self.groups,
            within=self.within,
            rule=self.rule,
            sizes=sizes,
            offsets=offsets,
            share=share,
            sliced=self.within > 1 and not self.packed,
            ways=self.ways,
            dim=self.dim,
            trained=self.trained,
            dtype=self.dtype,
            gradient=self.gradient,
            sections=self.sections,
            axis=self.axis,
            alike=self.alike,
        )

    def fixed(self) -> BucketKey:
        """The key of the same parameters if they are not trained: only ZeRO-3 shards those."""
        if self.rule.zero == 3:
            return replace(self, trained=False, tensors=False)
        return replace(self, trained=False, tensors=False, within=1, chunk=None, alike=1)


def replica_groups_of(dag: Dag, tensors: Collection[str] = ()) -> dict[str, BucketKey]:
    """For each parameter, its replica groups and the rule for its state. Parameters named in
    ``tensors`` are not sliced."""
    devices: dict[str, None] = {}
    places: defaultdict[str, dict[tuple[Group, ShardRule], None]] = defaultdict(dict)
    makers: defaultdict[str, dict[tuple[int, ...], Node]] = defaultdict(dict)
    shards: dict[str, ShardRule] = {}
    rules: dict[str, StateRule] = {}
    users: dict[str, int] = {}
    seen: dict[tuple[int, int], Group] = {}
    numbers: EqualNumbers[Group] = EqualNumbers()
    for node in (dag.nodes[number] for number in dag.operations.users):
        chunk = node.compute.chunk
        group = numbers.of(node.devices)
        if (chunk, group) in seen:
            continue
        seen[chunk, group] = node.devices
        axes = [n for rule in dag.sharded_along(chunk) for n in (rule.stride, rule.ways)]
        for name in dag.model.chunks[chunk].parameters:
            devices[name] = None
            users.setdefault(name, chunk)
            shards[name] = dag.shard(chunk, name) or _WHOLE
            places[name][node.devices, shards[name]] = None  # in order, in every process
            makers[name].setdefault((group, node.replicas, *axes), node)
            rules[name] = dag.state.get(chunk, rules.get(name, DEFAULT))
    _refuse_both(dag, seen)
    keys = {}
    known: dict[tuple[object, ...], tuple[tuple[Group, ...], int, int, StateRule]] = {}
    for name in devices:
        shard, rule = shards[name], rules[name]
        _refuse_other_parts(dag, name, [by for _, by in places[name]])
        parts = shard.ways
        key = (parts, rule, *sorted((numbers.of(g), by.stride) for g, by in places[name]))
        key += tuple(sorted(makers[name]))
        if key not in known:
            where = sorted(places[name], key=lambda place: min(place[0]))
            copies = _equal_copies(name, where, parts)
            holders = [group for group, _ in where]
            groups, within, chosen = _shard_groups(dag, name, holders, copies, rule)
            alike = 1
            if within == 1:
                groups, alike = _side_by_side(dag, groups, [*makers[name].values()])
            known[key] = groups, within, alike, chosen
        groups, within, alike, rule = known[key]
        facts = dag.model.parameters[name]
        user = users[name] if rule.zero >= 2 else None
        held = BucketKey(
            groups,
            within,
            rule,
            parts,
            shard.dim,
            True,
            facts.dtype,
            facts.gradient,
            user,
            shard.sections,
            shard.axis,
            name in tensors,
            alike,
        )
        keys[name] = held if facts.trained else held.fixed()
    return keys


def refuse_elsewhere(dag: Dag, known: tuple[Bucket, ...]) -> None:
    """Refuse an evaluation that uses parameters on other devices than training, whose buckets are
    ``known``."""
    buckets = {name: bucket for bucket in known for name in bucket.parameters}
    for number in dag.operations.users:
        node = dag.nodes[number]
        for name in dag.model.chunks[node.compute.chunk].parameters:
            if name in buckets and not _held_by(buckets[name], node.devices):
                replicas = sorted(d for group in buckets[name].groups for d in group)
                raise DirectiveError(
                    f"{name_of(dag, number)} uses the parameter {name!r} in evaluation on devices "
                    f"{list(node.devices)}, but training keeps it on {replicas}: use it in the "
                    "same regions in both modes, or place these regions on the same devices"
                )


def _held_by(bucket: Bucket, devices: Group) -> bool:
    """Whether each of ``devices`` holds ``bucket``, or can gather it from others of them."""
    whole = set(devices)
    if bucket.level < 3:
        return whole.issubset(d for group in bucket.groups for d in group)
    return whole.issubset(
        d for group in bucket.shard_groups if whole.issuperset(group) for d in group
    )


def _refuse_both(dag: Dag, places: Mapping[tuple[int, int], Group]) -> None:
    """Refuse a ZeRO-3 rule for several regions that includes experts whose devices all hold
    different experts: these have nothing to shard."""
    for (chunk, _), devices in places.items():
        shard, rule = dag.shards.get(chunk), dag.state.get(chunk)
        if shard is None or rule is None or rule.zero < 3 or shard.ways < max(2, len(devices)):
            continue
        others = [c for c, other in dag.state.items() if other is rule and c not in dag.shards]
        if others:
            tag = list(dag.model.chunks[chunk].tags)[-1]
            raise DirectiveError(
                f"{dag.history[rule.made_by]} would shard the parameters of "
                f"{region_of(dag, chunk)} over {group_text(devices)}, but each of these has "
                f"different experts because of {dag.history[shard.made_by]}, so nothing is left to "
                f"shard: give the experts a rule of their own, replicate({{{tag!r}: '-'}}, "
                f"zero=3) for the rest and replicate({{{tag!r}: '*'}}, zero=0); or use "
                "a smaller ways="
            )


def _refuse_other_parts(dag: Dag, name: str, shards: list[ShardRule]) -> None:
    """Refuse regions that share a parameter but shard it differently."""
    kinds = {(by.ways, by.dim, by.sections): by for by in shards}
    if len(kinds) > 1:
        several = [
            f"{by.ways} ways by {dag.history[by.made_by]}" if by.ways > 1 else "not at all"
            for by in kinds.values()
        ]
        raise DirectiveError(
            f"{name!r} is shared by regions that shard it in different ways: "
            f"{' and '.join(several)}; shard all of them alike (shard, place)"
        )


def _equal_copies(name: str, places: list[tuple[Group, ShardRule]], ways: int) -> tuple[Group, ...]:
    """The devices that hold each shard of a parameter that is sharded ``ways`` ways."""
    parts: dict[int, int] = {}
    for group, shard in places:
        for rank, device in enumerate(group):
            if parts.setdefault(device, shard.part(rank)) != shard.part(rank):
                raise DirectiveError(
                    f"device {device} would hold two parts of {name!r}: its groups "
                    f"({', '.join(str(list(g)) for g, _ in places)}) must agree on who holds which "
                    "experts; list the devices in the same order in every place"
                )
    replicas: list[list[int]] = [[] for _ in range(ways)]
    for device, part in parts.items():
        replicas[part].append(device)
    if len({len(group) for group in replicas}) > 1:
        raise DirectiveError(
            f"the parts of {name!r} would be held by different numbers of devices "
            f"({', '.join(str(group) for group in replicas)}): place its regions so that every "
            "part has as many replicas (place, shard)"
        )
    return tuple(map(tuple, replicas))


def _side_by_side(
    dag: Dag, groups: tuple[Group, ...], makers: Sequence[Node]
) -> tuple[tuple[Group, ...], int]:
    """``groups`` with devices that make equal gradients in all ``makers`` as neighbours, and the
    number of such neighbours; 1 if a device makes different copies in different makers."""
    copies: dict[int, int] = {}
    for node in makers:
        for rank, device in enumerate(node.devices):
            copy = dag.copy_of(node, rank)
            if copies.setdefault(device, copy) != copy:
                return groups, 1
    rows = [
        [[d for d in group if copies[d] == copy] for copy in sorted({copies[d] for d in group})]
        for group in groups
    ]
    numbers = {(len(row), len(devices)) for row in rows for devices in row}
    several = {len({dag.copy_of(n, r) for r in range(len(n.devices))}) for n in makers}
    if len(numbers) > 1 or several != {len(rows[0])}:
        return groups, 1
    together = [tuple(d for side in zip(*row, strict=True) for d in side) for row in rows]
    return tuple(together), len(rows[0])


def _shard_groups(
    dag: Dag, name: str, places: Sequence[Group], groups: tuple[Group, ...], rule: StateRule
) -> tuple[tuple[Group, ...], int, StateRule]:
    """``groups`` with the devices that shard one copy as neighbours, the number of these devices,
    and the rule that applies to them."""
    if rule.zero == 0:
        return groups, 1, rule
    most = len(groups[0])
    if rule.zero == 3:
        together = [_together(group, places) for group in groups]
        shared = math.gcd(*(len(run) for runs in together for run in runs))
        if shared == 1 < most:
            rule = replace(rule, zero=2)  # no two compute together: shard all but the parameters
        else:
            most = shared
            groups = tuple(tuple(d for run in runs for d in run) for runs in together)
    within = most if rule.within is None else rule.within
    if most % within:
        fits = [str(n) for n in range(1, most + 1) if most % n == 0]
        raise DirectiveError(
            f"{dag.history[rule.made_by]}: {name!r} is held by {most} devices that can shard it, "
            f"and {within} does not divide {most}: use within={' or '.join(fits)}"
        )
    return groups, within, rule


def _together(group: Group, places: Sequence[Group]) -> list[list[int]]:
    """The devices of ``group`` in runs: every place contains a run entirely or not at all."""
    members = [frozenset(place) for place in places]
    runs = grouped((tuple(device in place for place in members), device) for device in group)
    return list(runs.values())
