"""Orders the forwards that use a changing buffer: microbatch by microbatch, on one device."""

from __future__ import annotations

import itertools
from collections import defaultdict

from msgspec import structs

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, Node, name_of
from piper.ir.ops import Compute
from piper.ir.passes import Pass


def keep_buffers(dag: Dag, training: Dag | None = None) -> Dag:
    """``dag`` with the forwards that read or change a changing buffer in single-device order:
    microbatch by microbatch, chunk by chunk. If ``dag`` is an evaluation, ``training`` must use
    these buffers on the same device."""
    changing = {name for chunk in dag.model.chunks for name in chunk.changes}
    if training is not None:
        _refuse_apart(dag, training, changing)
    if not changing:
        return dag
    rows = _uses(dag, changing)
    me = len(dag.history)
    dag = dag.noted(f"buffers change in the order of microbatches ({', '.join(sorted(changing))})")
    changed: dict[int, Node] = {}
    for name, row in sorted(rows.items()):
        row.sort(key=lambda i: (dag.nodes[i].compute.microbatch, dag.nodes[i].compute.chunk))
        _refuse_several(dag, name, row)
        for before, number in itertools.pairwise(row):
            node = changed.get(number, dag.nodes[number])
            if before not in node.after:
                changed[number] = structs.replace(
                    node, after=(*node.after, before), after_by=(*node.after_by, me)
                )
    return dag.with_nodes(changed)


def _uses(dag: Dag, names: set[str]) -> dict[str, list[int]]:
    """The forwards that read or change each buffer."""
    rows: defaultdict[str, list[int]] = defaultdict(list)
    for number, node in enumerate(dag.nodes):
        if isinstance(node.op, Compute) and node.op.which is Pass.F:
            chunk = dag.model.chunks[node.op.chunk]
            for name in names.intersection((*chunk.changes, *chunk.buffers)):
                rows[name].append(number)
    return rows


def _refuse_apart(dag: Dag, training: Dag, changing: set[str]) -> None:
    """Refuse a buffer that changes in training or evaluation and is on different devices in
    them."""
    names = changing | {name for chunk in training.model.chunks for name in chunk.changes}
    trained = _uses(training, names)
    for name, row in sorted(_uses(dag, names).items()):
        here, there = _devices(dag, row), _devices(training, trained.get(name, []))
        if there and len(here | there) > 1:
            raise DirectiveError(
                f"{name_of(dag, row[0])} uses the buffer {name!r} in evaluation on devices "
                f"{sorted(here)}, and {name_of(training, trained[name][0])} in training on "
                f"{sorted(there)}: it changes, and only one of the copies would; update it in the "
                "region that reads it, or place both regions on one device"
            )


def _devices(dag: Dag, numbers: list[int]) -> set[int]:
    return {device for number in numbers for device in dag.nodes[number].devices}


def _refuse_several(dag: Dag, buffer: str, row: list[int]) -> None:
    devices = _devices(dag, row)
    if len(devices) > 1:
        by = {dag.history[dag.nodes[number].sends.made_by]: None for number in row}
        raise DirectiveError(
            f"{name_of(dag, row[0])} uses the buffer {buffer!r}, which changes, on several devices "
            f"({sorted(devices)}; {', '.join(by)}): each would change it for its own share of the "
            "batch alone; place all regions that use it on one device, or keep it fixed (for a "
            "BatchNorm, eval())"
        )
