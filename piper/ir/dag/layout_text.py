"""The layouts of all values of a placed DAG as text: one line per value and group of devices.

v2 hidden [8, 64]         @0,1,2,3    dp S(0), tp R           its gradient has the same layout
dw1 layer[0]              @0,1,2,3    dp P(sum), tp R
bucket0 optimizer state   @0,1,2,3    shard S(0)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import structs

from piper.ir.collectives import PartialSum, Placement, Replicated, Sharded
from piper.ir.dag.dag import Dag, Node, group_text, region_of
from piper.ir.dag.facts import Model
from piper.ir.dag.values import Role
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.layouts import BucketLayouts, Layout
from piper.ir.mesh import Mesh
from piper.ir.ops import Compute, Group
from piper.ir.rules import ShardRule


class LayoutLine(NamedTuple):
    """A value, the devices that hold it, and its layout on them."""

    value: str
    number: int
    """The number of the value, or of the bucket."""
    devices: Group
    layout: Layout

    def __str__(self) -> str:
        return f"{self.value:<36} @{group_text(self.devices):<10} {self.layout}"


def layouts_text(dag: Dag, models: Mapping[int, Model]) -> str:
    """All layouts, one per line; ``models`` holds the model's facts by number of parts."""
    return "\n".join(map(str, layout_lines(dag, models)))


def layout_lines(dag: Dag, models: Mapping[int, Model]) -> Iterator[LayoutLine]:
    """The layouts of the batch, activations and gradients, then of the parameters' buckets."""
    seen: set[tuple[str, str, int, int]] = set()
    groups: EqualNumbers[Group] = EqualNumbers()
    for node in dag.nodes:
        if not isinstance(node.op, Compute) or not node.devices:
            continue
        for line in _of_node(dag, models.get(node.parts, dag.model), node):
            key = line.value, str(line.layout), groups.of(node.devices), node.replicas
            if key not in seen:
                seen.add(key)
                yield line
    for number, bucket in enumerate(dag.buckets):
        layouts = BucketLayouts(bucket)
        devices = layouts.mesh.devices
        yield LayoutLine(f"bucket{number} parameters at rest", number, devices, layouts.at_rest)
        if layouts.at_rest != layouts.in_use:
            yield LayoutLine(f"bucket{number} parameters in use", number, devices, layouts.in_use)
        if bucket.trained:
            yield LayoutLine(
                f"bucket{number} gradients as made", number, devices, layouts.gradients
            )
            yield LayoutLine(f"bucket{number} optimizer state", number, devices, layouts.optimizer)


def _of_node(dag: Dag, model: Model, node: Node) -> Iterator[LayoutLine]:
    """The layouts of a node's reads and writes."""
    op = node.compute
    reads, writes = dag.table.wire(op.chunk, op.which, dag.policy(op.chunk), op.microbatch)
    for number in (*reads, *writes):
        value = dag.table.value(number)[0]
        match value.role:
            case Role.BATCH | Role.ACTIVATION:
                yield _tensor(dag, model, node, number)
            case Role.PARAMETER_GRADIENT:
                yield from _gradients(dag, model, node, number)
            case _:
                pass  # gradients are laid out as their activations; saved activations do not move


def _gradients(dag: Dag, model: Model, node: Node, number: int) -> Iterator[LayoutLine]:
    """The gradients of a chunk's parameters: one line for all with the same layout."""
    chunk = node.compute.chunk
    layout = _rows(node, PartialSum())
    if (rule := dag.shards.get(chunk)) is not None:
        layout = _experts(node, rule, PartialSum(), rule.dim)
    several: dict[str, Layout] = {}
    for name in model.chunks[chunk].parameters:
        along: dict[str, Placement] = {}
        for segment in model.chunks[chunk].segments:
            if (shard := segment.parameters.get(name)) is not None:
                along[segment.axis] = Sharded(shard.dim)
            elif segment.sharded:
                along[segment.axis] = PartialSum()
        several.setdefault(str(own := layout.along(**along)), own)
    for own in several.values():
        yield LayoutLine(f"dw{chunk} {region_of(dag, chunk)}", number, node.devices, own)


def _tensor(dag: Dag, model: Model, node: Node, number: int) -> LayoutLine:
    value, _ = dag.table.value(number)
    facts = model.values[value.of]
    letter = "x" if value.role is Role.BATCH else "v"
    name = f"{letter}{value.of} {facts.name} {list(facts.shape)}"
    if value.of in (model.loss, model.count):
        return LayoutLine(name, number, node.devices, _rows(node, PartialSum()))
    across: Placement = Replicated() if facts.rows is None else Sharded(facts.rows)
    chunk = node.compute.chunk
    if (rule := dag.shards.get(chunk)) is not None and value.role is Role.ACTIVATION:
        layout = _experts(node, rule, across, 0)
        return LayoutLine(f"{name} in {region_of(dag, chunk)}", number, node.devices, layout)
    layout = _rows(node, across).along(
        **{p.axis: PartialSum() if p.dim is None else Sharded(p.dim) for p in facts.placements}
    )
    return LayoutLine(name, number, node.devices, layout)


def _rows(node: Node, across: Placement) -> Layout:
    """``across`` along the axes that shard the batch, which come first; replicated along the
    others."""
    mesh = node.mesh or Mesh(node.devices, dp=len(node.devices))
    sizes = itertools.accumulate((size for _, size in mesh.axes), operator.mul)
    return Layout(mesh, tuple(across if size <= node.parts else Replicated() for size in sizes))


def _experts(node: Node, rule: ShardRule, across: Placement, dim: int) -> Layout:
    """The same, but sharded along ``dim`` on the expert parallel axis."""
    mesh = node.mesh or Mesh(node.devices, dp=len(node.devices))
    axes = [n for n, size in mesh.axes if (size, mesh.stride(n)) == (rule.ways, rule.stride)]
    if not axes:
        mesh, axes = rule.mesh(node.devices), ["ep"]
    return _rows(structs.replace(node, mesh=mesh), across).along(**{axes[0]: Sharded(dim)})
