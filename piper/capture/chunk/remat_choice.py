"""Chooses the activations that the forward saves for the backward: memory against recomputation.

``choose`` takes a joint graph and a policy and returns the forward ops to save. Parameters,
buffers, inputs and outputs are kept anyway and never count as saved. The base of a view is saved in
place of the view. Random draws are saved, never drawn again.
"""

from __future__ import annotations

import operator

from torch import fx

from piper.capture.chunk.joint import Joint
from piper.capture.chunk.recomputing import is_cheap
from piper.capture.graphs import (
    ancestors,
    base_of,
    computed_from,
    copied,
    has_tensor,
    is_random,
    module_of,
    operations,
    returned,
)
from piper.ir.passes import Kind, Ref, RematPolicy


def choose(joint: Joint, policy: RematPolicy) -> tuple[Joint, tuple[fx.Node, ...]]:
    """The joint graph (perhaps simplified) and the forward ops to save for the backward."""
    match policy:
        case RematPolicy.NONE:
            kept = _read_by_backward(joint)
        case RematPolicy.MIN_CUT:
            joint, kept = _min_cut(joint)
            fixed = _fixed(joint)
            kept = [node for node in kept if node not in fixed]
        case RematPolicy.ALL:
            kept = []
    return joint, _closed(joint, kept)


def _read_by_backward(joint: Joint) -> list[fx.Node]:
    fixed = _fixed(joint)
    return [
        node
        for node in joint.graph.nodes
        if node in joint.forward
        and node not in fixed
        and has_tensor(node)
        and any(user.op == "call_function" and user not in joint.forward for user in node.users)
    ]


def _fixed(joint: Joint) -> set[fx.Node]:
    """Ops that depend on buffers alone, or on buffers and the batch if the result is larger than
    its sources: cheaper to recompute than to keep for each microbatch."""
    trained = {ref.index for ref, _ in joint.gradients if ref.kind is Kind.INPUT_GRAD}
    buffers, inputs = (
        {node for node, ref in joint.arguments.items() if ref.kind is kind}
        for kind in (Kind.BUFFER, Kind.INPUT)
    )
    kept = {node for node in buffers if not is_changing(joint, joint.arguments[node])}
    inputs = {node for node in inputs if joint.arguments[node].index not in trained}
    ops = [node for node in operations(joint.graph) if not is_random(node)]
    constant = {*computed_from(ops, kept)}
    derived = computed_from(ops, kept | inputs)
    return constant | {x for x in derived if x not in constant and is_cheap(x, inputs)}


def _min_cut(joint: Joint) -> tuple[Joint, list[fx.Node]]:
    """The choice of torch's partitioner, on a new graph since it may also simplify."""
    # imported here: it takes 18 MiB, and workers never capture
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    if not joint.gradients:
        return joint, []
    module = module_of(copied(joint.graph))
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    # its common subexpression elimination would merge some random ops
    shares = not any(is_random(node) for node in module.graph.nodes)
    with config.patch(cse=shares):
        forward, _ = min_cut_rematerialization_partition(
            module, fakes, num_fwd_outputs=len(joint.results)
        )
    kept = {node.name for node in returned(forward.graph)[len(joint.results) :]}
    joint = joint.moved_to(module.graph)
    return joint, [node for node in operations(joint.graph) if node.name in kept]


def _closed(joint: Joint, kept: list[fx.Node]) -> tuple[fx.Node, ...]:
    """``kept`` with bases in place of views, plus all that the backward needs but cannot recompute:
    random draws, and copies of changing buffers."""
    stops = {*joint.arguments, *(base_of(node) for node in kept)}
    rebuilt = ancestors((node for _, node in joint.gradients), stops)
    changing = {n for n, ref in joint.arguments.items() if is_changing(joint, ref)}
    stops |= {n for n in rebuilt if _is_draw(n) or not changing.isdisjoint(n.all_input_nodes)}
    outputs = {node for ref, node in joint.results if ref.kind is Kind.OUTPUT}
    order = {node: i for i, node in enumerate(joint.graph.nodes)}
    return tuple(sorted(stops - joint.arguments.keys() - outputs, key=order.__getitem__))


def is_changing(joint: Joint, ref: Ref) -> bool:
    """Whether ``ref`` is a buffer whose content has changed by the time the backward runs."""
    return ref.kind is Kind.BUFFER and joint.demand.changing[ref.index]


def _is_draw(node: fx.Node) -> bool:
    """Whether the node is a tensor result of a random op."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and is_random(source) and has_tensor(node)
