"""``place``: run nodes on a group of devices.

    F PP[0] ─▶ F PP[1]     place({"PP": 0}, devices=[0, 2])     F PP[0] @0,2 ─▶ F PP[1] @1,3
                           place({"PP": 1}, devices=[1, 3])

The devices of a group shard each microbatch. Values between groups are sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from msgspec import structs

from piper.base.arguments import choice, named_arguments
from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, name_of
from piper.ir.dag.filters import Filter, FilterLike, select
from piper.ir.mesh import Mesh
from piper.ir.rules import SendRule, TensorRule
from piper.ir.shards import ContextAttention
from piper.strategies.directives.directive import (
    Directive,
    axis_names,
    check_axis,
    check_group,
    check_stream,
    device_group,
    plain_filter,
)
from piper.strategies.directives.tensor_parallel import with_rule


@dataclass(frozen=True)
class Place(Directive):
    name: ClassVar[str] = "place"

    where: FilterLike
    devices: tuple[int, ...]
    stream: str = "p2p"
    axes: Mapping[str, int] | None = None
    batch: tuple[str, ...] | None = None
    sequence: str | None = None
    attention: str = ContextAttention.ALL_TO_ALL.value

    def check(self) -> None:
        check_group(self.devices)
        check_stream("stream", self.stream)
        self._check_batch()
        self._check_sequence()

    def rewrite(self, dag: Dag, me: int) -> Dag:
        mesh = self.mesh
        group = self.devices if mesh is None else mesh.devices
        sends = SendRule(self.stream, me)
        changed = {}
        rules = dict(dag.tensor)
        for number in select(dag, Filter.of(self.where)):
            node = dag.nodes[number]
            if node.devices:
                raise DirectiveError(
                    f"{name_of(dag, number)} is already placed, on {list(node.devices)} by "
                    f"{dag.history[node.sends.made_by]}: make the two filters disjoint"
                )
            changed[number] = structs.replace(
                node, devices=group, mesh=mesh, replicas=self.replicas, sends=sends, made_by=me
            )
            if self.sequence is not None and mesh is not None:
                chunk, axis = node.compute.chunk, self.sequence
                rule = TensorRule(
                    axis,
                    mesh.size(axis),
                    mesh.stride(axis),
                    axis,
                    me,
                    {},
                    split=1,
                    context=ContextAttention(self.attention),
                )
                name = name_of(dag, number)
                rules[chunk] = with_rule(dag, name, rules.get(chunk, ()), rule)
        return replace(dag.with_nodes(changed), tensor=rules)

    @property
    def mesh(self) -> Mesh | None:
        """The devices with their axes; the axes that split the batch come first."""
        if self.axes is None:
            return None
        mesh = Mesh(self.devices, **self.axes)
        return mesh if self.batch is None else mesh.first(self.batch)

    @property
    def replicas(self) -> int:
        """The number of devices with the same rows: those along the axes that do not split the
        batch."""
        if self.axes is None or self.batch is None:
            return 1
        return math.prod(size for axis, size in self.axes.items() if axis not in self.batch)

    @property
    def parts(self) -> int:
        """The number of devices over which the rows of a microbatch are split."""
        return len(self.devices) // self.replicas

    def _check_batch(self) -> None:
        if self.batch is None:
            return
        if self.axes is None:
            raise DirectiveError(
                f"batch={list(self.batch)} names axes, but the devices have none: give "
                f"devices=Mesh({list(self.devices)}, ...)"
            )
        unknown = [axis for axis in self.batch if axis not in self.axes]
        if unknown:
            raise DirectiveError(
                f"batch names the axis {unknown[0]!r}, but the mesh has {', '.join(self.axes)}"
            )

    def _check_sequence(self) -> None:
        check_axis("sequence", self.sequence)
        choice("attention", self.attention, ContextAttention, DirectiveError)
        if self.sequence is None:
            if self.attention != ContextAttention.ALL_TO_ALL.value:
                raise DirectiveError(
                    f"attention={self.attention!r} is for a sequence that is sharded: name its "
                    "axis, sequence="
                )
            return
        axes = self.axes or {}
        if self.sequence not in axes:
            raise DirectiveError(
                f"sequence names the axis {self.sequence!r}, but the mesh has "
                f"{', '.join(axes) or 'none'}: give devices=Mesh(..., {self.sequence}=...)"
            )
        if self.batch is None or self.sequence in self.batch:
            raise DirectiveError(
                f"the axis {self.sequence!r} cannot shard both the sequence and the batch: name "
                "the others in batch="
            )

    def _written(self, field: str) -> str:
        if field == "devices" and self.axes is not None:
            return f"devices={Mesh(self.devices, **self.axes)}"
        return super()._written(field)

    def _shown(self, field: str) -> bool:
        return field != "axes"


@named_arguments(DirectiveError)
def place(
    where: FilterLike,
    *,
    devices: Sequence[int] | Mesh,
    stream: str = "p2p",
    batch: str | Sequence[str] | None = None,
    sequence: str | None = None,
    attention: str = "all_to_all",
) -> Place:
    """Run the matched nodes on ``devices``, which split each microbatch.

    ``devices`` is a list, or a ``Mesh`` whose axes other directives can name. ``batch`` names the
    axes that split the batch, by default all. Devices along the other axes have the same rows and
    compute the same, unless ``shard`` shards them. ``sequence`` is the axis that shards the
    sequence, dimension 1 of the batch tensors (context parallelism). Then ``attention`` is
    "all_to_all" (each device attends over whole sequences for some of the heads) or "all_gather"
    (each device gathers all keys and values for one block from the head and one from the tail of
    the sequence, so a causal mask gives all devices the same work). The nodes send to other groups
    on ``stream``. A filter on the microbatch can place one stage on different groups.
    """
    names = axis_names("batch", batch)
    axes = dict(devices.axes) if isinstance(devices, Mesh) else None
    group = devices.devices if isinstance(devices, Mesh) else device_group(devices)
    return Place(plain_filter(where), group, stream, axes, names, sequence, attention)
