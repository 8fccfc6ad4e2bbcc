"""Values that depend on the batch alone and are larger than their sources, such as attention masks.
Every chunk that reads one recomputes it, so that no device sends it.

    attention_mask [4, 2048] ─▶ mask [4, 1, 2048, 2048] ─▶ layer[0]
                                                        └▶ layer[1], on another device
"""

from __future__ import annotations

import operator
from collections.abc import Collection

from torch import Tensor, fx
from torch._ops import OpOverload

from piper.capture.graphs import (
    ancestors,
    computed_from,
    is_random,
    nbytes_of,
    operations,
    returned,
)
from piper.capture.op_costs import node_flops
from piper.capture.trace.exported import Exported

_FLOPS = 8
"""The most FLOPs of matrix products for each element of a recomputed value."""


def recomputed_of(
    exported: Exported, constants: Collection[fx.Node], homes: dict[fx.Node, int]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The values that each reading chunk recomputes, and the ops that may take part in that.
    Removes these values, and ops that only they need, from ``homes``, except in a chunk that would
    be left empty."""
    derived = _derived(exported, constants)
    made = {
        node
        for node in derived
        if any(homes.get(user, homes[node]) != homes[node] for user in node.users)
        and is_cheap(node, exported.inputs)
    }
    left = dict(homes)
    for node in reversed(derived):
        if node in made or not any(user in left for user in node.users):
            del left[node]
    kept = set(left.values())
    homes_left = {n: home for n, home in homes.items() if n in left or home not in kept}
    made = {node for node in made if node not in homes_left}
    homes.clear()
    homes.update(homes_left)
    return made, set(derived)


def recomputed_in(
    graph: fx.Graph,
    inputs: Collection[fx.Node],
    constants: Collection[fx.Node],
    moves: Collection[fx.Node],
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The same for the segments of one device's share of a chunk: values larger than the ``inputs``
    that they are computed from, with ops that only such values read; and all ops that may take part
    in recomputing them."""
    ops = (node for node in operations(graph) if node not in moves and not is_random(node))
    by = computed_from(ops, {*inputs, *constants})
    ends = set(returned(graph))
    again: set[fx.Node] = set()
    for node in reversed(by):
        if node not in ends and (again.issuperset(node.users) or is_cheap(node, inputs)):
            again.add(node)
    return again, set(by)


def is_cheap(node: fx.Node, sources: Collection[fx.Node]) -> bool:
    """Whether a value takes few FLOPs and is larger than the ``sources`` it is computed from."""
    if not isinstance(node.meta.get("val"), Tensor):
        return False
    ops = ancestors([node], sources)
    read = {arg for op in ops for arg in op.all_input_nodes if arg in sources}
    if sum(map(nbytes_of, read)) >= nbytes_of(node):
        return False
    flops = sum(node_flops(op) for op in ops if op.op == "call_function")
    return flops <= _FLOPS * node.meta["val"].numel()


def _derived(exported: Exported, constants: Collection[fx.Node]) -> dict[fx.Node, None]:
    """Ops that depend on the batch, but on no parameter, random draw or changing buffer; without
    the results of the step."""
    known = {n for n, name in exported.buffers.items() if name not in exported.updates}
    known.update(exported.inputs, constants)
    results = {exported.loss, exported.count, *exported.outputs, *exported.updates.values()}
    ops = (
        node
        for node in operations(exported.graph)
        if isinstance(node.target, OpOverload) or node.target is operator.getitem
    )
    return computed_from((x for x in ops if x not in results and not is_random(x)), known)
