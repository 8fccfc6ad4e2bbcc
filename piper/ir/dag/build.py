"""Build the DAG from a model's facts: one node per pass, no devices and no microbatches yet. Then,
where regions are cut into segments, the DAG of these from that of the regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from msgspec import structs

from piper.ir.dag.dag import PASS, Dag, Node
from piper.ir.dag.facts import ChunkFacts, Model
from piper.ir.dag.values import ValueTable
from piper.ir.grouped import grouped
from piper.ir.ops import Compute
from piper.ir.passes import Pass

R = TypeVar("R")


def build(model: Model) -> Dag:
    """The DAG of one unsplit batch: the forwards in order, then the backwards in reverse."""
    table = ValueTable(model)
    trained = [c for c in model.chunks if Pass.B in c.variants[model.remat].passes]
    order = [(chunk, Pass.F) for chunk in model.chunks]
    order += [(chunk, Pass.B) for chunk in reversed(trained)]
    return Dag(model, table, tuple(_node(model, table, chunk, which) for chunk, which in order))


def _node(model: Model, table: ValueTable, chunk: ChunkFacts, which: Pass) -> Node:
    reads, writes = table.wire(chunk.index, which, model.remat, 0)
    return Node(Compute(chunk.index, which, 0), {**chunk.tags, PASS: which}, reads, writes)


def of_segments(regions: Dag, model: Model, origin: Sequence[int]) -> Dag:
    """``regions``, the DAG of a model that is laid out and not ordered, for ``model``, the same
    model cut into segments. ``origin`` gives, for each segment, the chunk it is cut from: it is
    placed, split and ruled like this."""
    table = ValueTable(model)
    segments = grouped((chunk, segment) for segment, chunk in enumerate(origin))

    def ruled(rules: Mapping[int, R]) -> dict[int, R]:
        return {segment: rules[of] for segment, of in enumerate(origin) if of in rules}

    remat = ruled(regions.remat)
    nodes = []
    for node in regions.nodes:
        which, microbatch = node.compute.which, node.compute.microbatch
        mine = segments[node.compute.chunk]
        for chunk in mine if which is Pass.F else reversed(mine):
            policy = remat.get(chunk, model.remat)
            if which in model.chunks[chunk].variants[policy].passes:
                op = Compute(chunk, which, microbatch)
                reads, writes = table.wire(chunk, which, policy, microbatch)
                nodes.append(structs.replace(node, op=op, reads=reads, writes=writes))
    return replace(
        regions,
        model=model,
        table=table,
        nodes=tuple(nodes),
        state=ruled(regions.state),
        shards=ruled(regions.shards),
        tensor=ruled(regions.tensor),
        remat=remat,
    )
