"""A buffer that a region changes sees the microbatches one after another, on one device."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

from piper.capture.program import Pass
from piper.errors import DirectiveError
from piper.ir.dag import Compute, Dag
from piper.ir.text import name_of


def keep_buffers(dag: Dag) -> Dag:
    """``dag`` with the forwards of regions that change a buffer in the order of microbatches."""
    rows: defaultdict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(dag.nodes):
        op = node.op
        if isinstance(op, Compute) and op.which is Pass.F and dag.model.chunks[op.chunk].changes:
            rows[op.chunk].append(number)
    changed = {}
    for chunk, row in rows.items():
        row.sort(key=lambda number: dag.nodes[number].compute.microbatch)
        _refuse_several(dag, dag.model.chunks[chunk].changes, row)
        for before, number in itertools.pairwise(row):
            node = dag.nodes[number]
            if before not in node.after:
                changed[number] = replace(
                    node, after=(*node.after, before), after_by=(*node.after_by, node.made_by)
                )
    return dag.with_nodes(changed) if changed else dag


def _refuse_several(dag: Dag, buffers: tuple[str, ...], row: list[int]) -> None:
    devices = {device for number in row for device in dag.nodes[number].devices}
    if len(devices) > 1:
        by = dag.history[dag.nodes[row[0]].sends.made_by]
        raise DirectiveError(
            f"{name_of(dag, row[0])} changes the buffer {buffers[0]!r} and runs on several devices "
            f"({sorted(devices)}, {by}): each would see other data and change it differently; "
            "place the region on one device, or keep the buffer fixed (for a BatchNorm, eval())"
        )
