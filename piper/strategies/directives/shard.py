"""``shard``: expert parallelism, and (``tensor_parallel.py``) tensor parallelism.

    pre ─▶ EP ─▶ post   @0,1      shard({"EP": "*"})      pre ─▶ a2a ─▶ EP ─▶ a2a ─▶ post   @0,1
          E experts each                                        E/2 experts each

The region's parameters are sharded along ``dim`` over its group. Its inputs and outputs are
expert-major; an all-to-all dispatch and combine lets each device compute its own experts for the
whole group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from msgspec import structs

from piper.base.arguments import named_arguments
from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, Node, name_of
from piper.ir.dag.facts import ChunkFacts
from piper.ir.dag.filters import Filter, FilterLike
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.mesh import Mesh
from piper.ir.ops import Group
from piper.ir.rules import ShardRule
from piper.strategies.directives.directive import (
    Directive,
    axis_names,
    check_axis,
    check_stream,
    plain_filter,
    positive,
    whole_chunks,
)
from piper.strategies.directives.tensor_parallel import (
    check_patterns,
    refuse_tied_names,
    tensor_rules,
)


@dataclass(frozen=True)
class Shard(Directive):
    name: ClassVar[str] = "shard"

    where: FilterLike
    stream: str | None = None
    dim: int = 0
    ways: int | None = None
    axis: str | None = None
    parameters: Mapping[str, int | str] | None = None
    sequence: bool = False
    capacity: float | None = None
    batch: tuple[str, ...] | None = None

    def check(self) -> None:
        if self.stream is not None:
            check_stream("stream", self.stream)
        check_axis("axis", self.axis)
        check_patterns(self.parameters)
        if self.axis is None and (self.parameters is not None or self.sequence):
            raise DirectiveError(
                "parameters= and sequence= are for tensor parallelism: name the axis of the "
                "mesh along which the parameters are sharded, axis="
            )
        if not isinstance(self.dim, int) or self.dim < 0:
            raise DirectiveError(f"dim={self.dim!r} must be the number of a dimension, from 0")
        if self.capacity is not None and not (
            isinstance(self.capacity, int | float) and self.capacity > 0
        ):
            raise DirectiveError(
                f"capacity={self.capacity!r} must be a positive number, of how many times a "
                "device's own rows there is room for, or None for all"
            )
        if self.ways is not None:
            positive("ways", self.ways)
            if self.axis is not None:
                raise DirectiveError(f"ways={self.ways} and axis={self.axis!r}: give one of them")
        if self.batch is not None and self.axis is not None:
            raise DirectiveError(
                f"batch={list(self.batch)} and axis={self.axis!r}: with axes that divide the rows "
                "of experts, say how many ways, ways="
            )

    def rewrite(self, dag: Dag, me: int) -> Dag:
        numbers = whole_chunks(dag, Filter.of(self.where), "sharding")
        if self._is_tensor(dag, numbers):
            assert self.axis is not None
            stream = self.stream or self.axis
            return tensor_rules(dag, me, numbers, self.axis, self.parameters, self.sequence, stream)
        return self._experts(dag, me, numbers, self.stream or "exchange")

    def check_names(self, keys: Mapping[str, str]) -> None:
        """Refuse patterns that match only other names of tied parameters; ``keys`` maps every name
        to the first one."""
        with self._named():
            refuse_tied_names(self.parameters or (), keys)

    def tensor_ways(self, dag: Dag) -> dict[int, int]:
        """The chunks that this shards along an axis whose devices have the same rows, and over how
        many devices; none if these are experts."""
        numbers = whole_chunks(dag, Filter.of(self.where), "sharding")
        if not self._is_tensor(dag, numbers):
            return {}
        nodes = [dag.nodes[number] for number in numbers]
        return {n.compute.chunk: n.mesh.size(self.axis) for n in nodes if n.mesh and self.axis}

    def _is_tensor(self, dag: Dag, numbers: list[int]) -> bool:
        """Whether this is tensor parallelism: along an axis whose devices have the same rows."""
        if self.axis is None:
            return False
        for number in numbers:
            node = dag.nodes[number]
            if not node.devices:
                raise DirectiveError(f"{name_of(dag, number)} is not placed yet: place it before")
            self._refuse_no_axis(node, name_of(dag, number), self.axis)
            assert node.mesh is not None
            if node.mesh.size(self.axis) > 1:
                return self.parameters is not None or node.mesh.stride(self.axis) < node.replicas
        return self.parameters is not None

    def _experts(self, dag: Dag, me: int, numbers: list[int], stream: str) -> Dag:
        shards = dict(dag.shards)
        groups: dict[int, Group] = {}
        dag = self._with_rows_divided(dag, me, numbers)
        for number in numbers:
            node = dag.nodes[number]
            chunk = dag.model.chunks[node.compute.chunk]
            if not node.devices:
                raise DirectiveError(f"{name_of(dag, number)} is not placed yet: place it before")
            if chunk.sorted_rows is not None:
                self._refuse_sequence(dag, chunk.index, node, name_of(dag, number))
            ways, stride = self._division(node, name_of(dag, number))
            if node.parts % ways:
                raise DirectiveError(
                    f"ways={ways} does not divide the {node.parts} devices of "
                    f"{name_of(dag, number)}"
                )
            rule = ShardRule(ways, self.dim, stream, me, stride, capacity=self.capacity)
            earlier = shards.get(chunk.index, rule)
            if earlier != rule and earlier.made_by == me:
                raise DirectiveError(
                    f"{name_of(dag, number)} runs on {list(node.devices)}, but other microbatches "
                    f"of it on {list(groups[chunk.index])}: say how many ways, ways="
                )
            if earlier.made_by != me:
                raise DirectiveError(
                    f"{name_of(dag, number)} is already sharded, {earlier.ways} ways by "
                    f"{dag.history[earlier.made_by]}"
                )
            if chunk.random and ways > 1:
                raise DirectiveError(
                    f"{name_of(dag, number)} draws random numbers (dropout): a share of its rows "
                    "would draw others than the whole; do that outside the region"
                )
            if self.capacity is not None and chunk.sorted_rows is None:
                raise DirectiveError(
                    f"capacity={self.capacity}: {name_of(dag, number)} has a fixed number of rows "
                    "for each expert; capacity= is of rows that are sorted by expert"
                )
            shards[chunk.index] = rule
            groups[chunk.index] = node.devices
            self._check(dag, chunk, ways, name_of(dag, number))
        self._refuse_half_shared(dag, shards)
        return replace(dag, shards=shards)

    def _with_rows_divided(self, dag: Dag, me: int, numbers: list[int]) -> Dag:
        """``dag`` with the rows of the matched nodes sharded along all axes in ``batch``."""
        if self.batch is None:
            return dag
        changed: dict[int, Node] = {}
        rules = dict(dag.tensor)
        distinct: EqualNumbers[Mesh] = EqualNumbers()
        meshes: dict[int, Mesh] = {}
        for number in numbers:
            node = dag.nodes[number]
            for axis in self.batch if node.devices else ():
                self._refuse_no_axis(node, name_of(dag, number), axis)
            if node.mesh is None:
                continue
            mesh = meshes.setdefault(distinct.of(node.mesh), node.mesh.first(self.batch))
            others = [size for axis, size in mesh.axes if axis not in self.batch]
            changed[number] = structs.replace(
                node, devices=mesh.devices, mesh=mesh, replicas=math.prod(others), made_by=me
            )
            chunk = node.compute.chunk
            rules[chunk] = tuple(r for r in dag.tensor.get(chunk, ()) if r.axis not in self.batch)
        return replace(
            dag.with_nodes(changed), tensor={chunk: row for chunk, row in rules.items() if row}
        )

    def _division(self, node: Node, name: str) -> tuple[int, int]:
        """The expert parallel size of a node, and the distance between the devices of a shard
        group."""
        if self.axis is None:
            return (node.parts if self.ways is None else self.ways), node.replicas
        self._refuse_no_axis(node, name, self.axis)
        assert node.mesh is not None
        return node.mesh.size(self.axis), node.mesh.stride(self.axis)

    def _refuse_no_axis(self, node: Node, name: str, axis: str) -> None:
        mesh = node.mesh
        if mesh is None or axis not in dict(mesh.axes):
            axes = ", ".join(name for name, _ in mesh.axes) if mesh else ""
            has = f"has the axes {axes}" if axes else "has no named axes"
            raise DirectiveError(
                f"axis={axis!r}: {name} is placed on {mesh or list(node.devices)}, which "
                f"{has}; give place(..., devices=Mesh(..., {axis}=...))"
            )

    def _refuse_sequence(self, dag: Dag, chunk: int, node: Node, name: str) -> None:
        """Refuse a sharded sequence: rows sorted by expert are not in sequence order."""
        for rule in dag.tensor.get(chunk, ()):
            if rule.ways > 1 and rule.split is not None and node.mesh is not None:
                axes = [axis for axis, _ in node.mesh.axes]
                raise DirectiveError(
                    f"{name} takes rows that are sorted by expert, but "
                    f"{dag.history[rule.made_by]} shards the sequence along {rule.axis!r}: let all "
                    f"axes divide these rows, shard(..., batch={axes}), as mesh does"
                )

    def _refuse_half_shared(self, dag: Dag, shards: dict[int, ShardRule]) -> None:
        """Refuse a parameter that is sharded for some of its regions only."""
        sharded = {name for chunk in shards for name in dag.model.chunks[chunk].parameters}
        for chunk in dag.model.chunks:
            shared = sharded.intersection(chunk.parameters)
            if shared and chunk.index not in shards:
                raise DirectiveError(
                    f"the parameter {min(shared)!r} is used by a region that the filter does not "
                    f"match too ({dict(chunk.tags)}): shard all of its regions in one directive"
                )

    def _check(self, dag: Dag, chunk: ChunkFacts, ways: int, name: str) -> None:
        sizes = {}
        for parameter in chunk.parameters:
            shape = dag.model.parameters[parameter].shape
            if len(shape) <= self.dim:
                raise DirectiveError(
                    f"{name} cannot be sharded: {parameter} has shape {list(shape)} and no "
                    f"dimension {self.dim}"
                )
            sizes[parameter] = shape[self.dim]
        if len(set(sizes.values())) > 1:
            each = ", ".join(f"{parameter} has {n}" for parameter, n in sizes.items())
            raise DirectiveError(
                f"{name} mixes experts: dimension {self.dim} of its parameters differs ({each}); "
                "put the experts alone into the region"
            )
        if not sizes:
            raise DirectiveError(f"{name} has no parameters to shard")
        experts = next(iter(sizes.values()))
        if experts % ways:
            fits = [n for n in range(1, experts + 1) if experts % n == 0]
            raise DirectiveError(
                f"{name}: {experts} experts do not divide over {ways} devices; "
                f"numbers that work: {', '.join(map(str, fits))}"
            )
        for value in (*chunk.inputs, *chunk.outputs) if chunk.sorted_rows is None else ():
            facts = dag.model.values[value]
            if len(facts.shape) < 2 or facts.shape[0] != experts:
                raise DirectiveError(
                    f"{name} mixes experts: its input or output {facts.name} has shape "
                    f"{list(facts.shape)} and is not expert-major ([{experts}, rows, ...]); move "
                    "dispatch and combine outside the region"
                )


@named_arguments(DirectiveError)
def shard(
    where: FilterLike,
    *,
    stream: str | None = None,
    dim: int = 0,
    ways: int | None = None,
    axis: str | None = None,
    parameters: Mapping[str, int | str] | None = None,
    sequence: bool = False,
    capacity: float | None = None,
    batch: str | Sequence[str] | None = None,
) -> Shard:
    """Shard the parameters of the matched regions over their devices.

    Expert parallelism: along ``dim``, over the whole group. The regions' inputs and outputs are
    dispatched and combined by all_to_all on ``stream``. ``ways`` is the expert parallel size: if it
    is smaller than the group, each ``ways`` adjacent devices hold all experts. ``axis`` names a
    ``Mesh`` axis for the experts instead. Rows sorted by expert are sent by count (no token is
    dropped); a device has room for ``capacity`` times its own rows, by default for all rows.
    ``batch`` names the ``Mesh`` axes that shard the rows of these regions, by default those of
    ``place``. If it includes the tensor and context parallel axes, the experts compute each row
    once, not once on each device along these axes.

    Tensor parallelism: along an ``axis`` that is not in ``place(batch=)``, so its devices have the
    same rows. ``parameters`` maps patterns of parameter names to the sharded dimension, or patterns
    of module names to "column" or "row". The default is the plan that the model declares (its
    attribute ``tensor_plan``, or ``_tp_plan`` of transformers models). ``sequence`` shards the
    otherwise replicated activations between the sharded products along dimension 1 (sequence
    parallelism).
    """
    rows = axis_names("batch", batch)
    return Shard(plain_filter(where), stream, dim, ways, axis, parameters, sequence, capacity, rows)
