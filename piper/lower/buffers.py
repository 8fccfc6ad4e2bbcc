"""A buffer that a region changes sees the microbatches one after another, on one device."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

from piper.capture.program import Pass
from piper.errors import DirectiveError
from piper.ir.dag import Compute, Dag, Node
from piper.ir.text import name_of


def keep_buffers(dag: Dag) -> Dag:
    """``dag`` with the forwards that read or change a changing buffer in the order in which one
    device would run them: microbatch by microbatch, chunk by chunk."""
    changing = {name for chunk in dag.model.chunks for name in chunk.changes}
    if not changing:
        return dag
    rows: defaultdict[str, list[int]] = defaultdict(list)
    for number, node in enumerate(dag.nodes):
        if isinstance(node.op, Compute) and node.op.which is Pass.F:
            chunk = dag.model.chunks[node.op.chunk]
            for name in changing.intersection((*chunk.changes, *chunk.buffers)):
                rows[name].append(number)
    me = len(dag.history)
    dag = dag.noted(f"buffers change in the order of microbatches ({', '.join(sorted(changing))})")
    changed: dict[int, Node] = {}
    for name, row in sorted(rows.items()):
        row.sort(key=lambda i: (dag.nodes[i].compute.microbatch, dag.nodes[i].compute.chunk))
        _refuse_several(dag, name, row)
        for before, number in itertools.pairwise(row):
            node = changed.get(number, dag.nodes[number])
            if before not in node.after:
                changed[number] = replace(
                    node, after=(*node.after, before), after_by=(*node.after_by, me)
                )
    return dag.with_nodes(changed)


def _refuse_several(dag: Dag, buffer: str, row: list[int]) -> None:
    devices = {device for number in row for device in dag.nodes[number].devices}
    if len(devices) > 1:
        by = {dag.history[dag.nodes[number].sends.made_by]: None for number in row}
        raise DirectiveError(
            f"{name_of(dag, row[0])} uses the buffer {buffer!r}, which changes, on several devices "
            f"({sorted(devices)}; {', '.join(by)}): each would see other data and change it "
            "differently; place all regions that use it on one device, or keep it fixed (for a "
            "BatchNorm, eval())"
        )
