"""One optimizer step per device, for optimizers that cannot step bucket by bucket.

    all_reduce ─▶ update bucket 0 ┐
    all_reduce ─▶ update bucket 1 ┴─▶ update bucket 2: steps with all gradients

On each device, the update of the last bucket waits for the others and reads their inputs, so the
gradients stay alive and the plan accounts for their memory.
"""

from __future__ import annotations

from msgspec import structs

from piper.ir.dag.dag import Dag, Node
from piper.ir.grouped import grouped
from piper.ir.ops import Update


def step_at_once(dag: Dag) -> Dag:
    """``dag`` in which the last update of every device runs after all others and reads all their
    inputs."""
    updates = [(i, n.op.bucket) for i, n in enumerate(dag.nodes) if isinstance(n.op, Update)]
    updates.sort(key=lambda update: update[1])
    pairs = ((device, i) for i, _ in updates for device in dag.nodes[i].devices)
    rows = {tuple(row) for row in grouped(pairs).values()}
    changed: dict[int, Node] = {}
    for *others, last in sorted(rows):
        node = changed.get(last, dag.nodes[last])
        before = [i for i in others if i not in node.after]
        reads = [value for i in others for value in dag.nodes[i].reads]
        changed[last] = structs.replace(
            node,
            reads=tuple(dict.fromkeys((*node.reads, *reads))),
            after=(*node.after, *before),
            after_by=(*node.after_by, *(node.made_by for _ in before)),
        )
    return dag.with_nodes(changed) if changed else dag
