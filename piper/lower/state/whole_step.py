"""One step of the optimizer on each device, for those that do not step bucket by bucket.

    all_reduce ─▶ update bucket 0 ┐
    all_reduce ─▶ update bucket 1 ┴─▶ update bucket 2: steps with all gradients

The updates of a device come in the order of its buckets. The last one waits for the others, and
reads what they read: so the gradients stay, and what holds them is in the plan.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from piper.ir.dag.dag import Dag, Node
from piper.ir.ops import Update


def step_at_once(dag: Dag) -> Dag:
    """``dag`` where the last update of every device comes after all others, and reads all that
    they do."""
    updates = [(i, n.op.bucket) for i, n in enumerate(dag.nodes) if isinstance(n.op, Update)]
    updates.sort(key=lambda update: update[1])
    of_device: defaultdict[int, list[int]] = defaultdict(list)
    for number, _ in updates:
        for device in dag.nodes[number].devices:
            of_device[device].append(number)
    rows = {tuple(row) for row in of_device.values()}
    changed: dict[int, Node] = {}
    for *others, last in sorted(rows):
        node = changed.get(last, dag.nodes[last])
        before = [i for i in others if i not in node.after]
        reads = [value for i in others for value in dag.nodes[i].reads]
        changed[last] = replace(
            node,
            reads=tuple(dict.fromkeys((*node.reads, *reads))),
            after=(*node.after, *before),
            after_by=(*node.after_by, *(node.made_by for _ in before)),
        )
    return dag.with_nodes(changed) if changed else dag
