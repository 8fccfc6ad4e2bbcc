"""Adds the all-reduces of a step's scalars over all devices: the loss and its divisor, the gradient
norm, the rows of each expert, and other reported outputs.

F loss MB[0] ─▶ ┌ all_reduce ┐ ─loss─▶ ...          update ─▶ ┌ all_reduce ┐ ─norm─▶
F loss MB[1] ─▶ └            ┘                      update ─▶ └            ┘

An update waits for the loss all-reduce if the loss has a divisor, and for the norm if gradients are
clipped. The norm is computed before the updates if gradients are clipped, otherwise after them.
"""

from __future__ import annotations

from msgspec import structs

from piper.ir.collectives import PartialSum, Replicated
from piper.ir.dag.dag import Dag
from piper.ir.dag.values import Content, Extra
from piper.ir.ops import Collective, Group, Update
from piper.lower.rewriter import Rewriter

STREAM = "scalars"


def add_scalar_reductions(dag: Dag, *, clip: bool) -> Dag:
    """``dag`` with the sums of its scalars over all devices."""
    out = Rewriter(dag)
    groups = {id(group): group for group, _ in dag.operations.groups}
    everyone = tuple(sorted({device for group in groups.values() for device in group}))
    loss = _all_reduce(out, Content.LOSS, everyone, _losses(dag))
    updates = [i for i in dag.operations.others if isinstance(dag.nodes[i].op, Update)]
    needed = [loss] if dag.model.count is not None else []
    if clip and updates:
        gradients = [value for i in updates for value in dag.nodes[i].reads]
        norm = _all_reduce(out, Content.NORM, everyone, list(dict.fromkeys(gradients)))
        needed.append(norm)
    for i in updates:
        node = dag.nodes[i]
        out.nodes[i] = structs.replace(node, reads=(*node.reads, *needed))
    if not clip and updates:
        done = [value for i in updates for value in dag.nodes[i].writes]
        _all_reduce(out, Content.NORM, everyone, done)
    for output in dag.model.outputs:
        if not dag.model.values[output].shape:
            _all_reduce(out, Content.OUTPUT, everyone, dag.activations(output), of=output)
    for chunk, counts in _counts(dag).items():
        _all_reduce(out, Content.LOAD, everyone, counts, of=chunk)
    return out.dag()


def _counts(dag: Dag) -> dict[int, list[int]]:
    """For each chunk of experts with sorted rows, the row counts of all microbatches."""
    wanted = {
        chunk.inputs[chunk.sorted_rows.counts]: chunk.index
        for chunk in dag.model.chunks
        if chunk.sorted_rows is not None
    }
    return {chunk: dag.activations(value) for value, chunk in wanted.items()}


def _losses(dag: Dag) -> list[int]:
    """The losses of all microbatches, then their divisors."""
    counts = [] if dag.model.count is None else dag.activations(dag.model.count)
    return dag.activations(dag.model.loss) + counts


def _all_reduce(
    out: Rewriter, content: Content, everyone: Group, reads: list[int], of: int = 0
) -> int:
    op = Collective(PartialSum(), Replicated(), (everyone,))
    made = out.value(Extra(content, of, op.after))
    return out.add(op, made, devices=everyone, stream=STREAM, reads=reads, made_by=0)
