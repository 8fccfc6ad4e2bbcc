"""Build the DAG from a model's facts: one node per pass, no devices and no microbatches yet."""

from __future__ import annotations

from piper.ir.dag.dag import PASS, Dag, Node
from piper.ir.dag.facts import ChunkFacts, Model
from piper.ir.dag.values import ValueTable
from piper.ir.ops import Compute
from piper.ir.passes import Pass


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
