"""A device's share of the nodes of one kind: all that their instructions have in common. A kind has
one share, a transfer two: to send and to receive.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.collectives import Move
from piper.ir.dag.dag import Node, words_of
from piper.ir.dag.values import PARAMETER_GRADIENTS, Content, Role
from piper.ir.ops import Add, Collective, Compute, Group, Select, Transfer
from piper.ir.plan.instructions import COMMUNICATING, NO_ROWS, RowShards, Slot, Verb
from piper.lower.plans.plan_context import PlanContext

_UNDER_WAY = 2
"""Limit on sends, or on reduce-scatters, in progress on a stream: each holds its input until it
ends. The limit is 1 for gradients that are reduce-scattered every microbatch (ZeRO-2 and 3)."""
_SMALL = 2**16
"""Bytes up to which a receive may be issued early: a message that arrives during the computation
before is taken at once. Otherwise the sender is asked only when the message is needed, and the
device waits for the answer. A larger message would hold memory that the plan does not count, and
the handshake is a small part of its time."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeShare:
    """What the instructions of some nodes have in common."""

    verb: Verb
    stream: str
    classes: tuple[int, ...]
    """The rank classes that take part."""
    words: tuple[str, str]
    """The name before and after the tags."""
    content: Content | None
    of: int
    rows: RowShards
    axes: tuple[tuple[str, int, int], ...]
    slots: tuple[Slot | None, ...]
    """The slot of each value that it makes; None for gradients of parameters: where they lie
    depends on other instructions."""
    fresh: tuple[Slot, ...]
    """The same if every value is new: nothing is added to it, and it overwrites nothing."""
    given: bool
    """Whether it reads tensors of the batch, or seeds."""
    gradients: bool
    """Whether it makes gradients of parameters, or sums of them."""
    early: bool
    """Whether it receives a message so small that it may be received early."""
    limit: int
    """How many of these may be in progress on a stream; 0 for no limit."""
    computes: bool
    communicates: bool
    moves_value: bool
    """Whether it communicates a value of the model."""


def shares_of(shared: PlanContext, node: Node) -> tuple[NodeShare, ...]:
    """The shares of the nodes of one kind, of which ``node`` is one."""
    op = node.op
    if isinstance(op, Transfer):
        return (
            _share(shared, node, Verb.SEND, f"{node.stream}/send", op.source),
            _share(shared, node, Verb.RECV, f"{node.stream}/recv", op.target),
        )
    verb = _VERBS.get(type(op), Verb.UPDATE)
    return (_share(shared, node, verb, node.stream, node.devices),)


_VERBS = {
    Compute: Verb.COMPUTE,
    Collective: Verb.COLLECTIVE,
    Add: Verb.ADD,
    Select: Verb.SELECT,
}


def _share(shared: PlanContext, node: Node, verb: Verb, stream: str, devices: Group) -> NodeShare:
    computes = verb is Verb.COMPUTE
    content, of = shared.about(node)
    roles = [shared.dag.role(value) for value in node.reads if computes]
    made = node.writes if verb is not Verb.SEND else ()
    slots = tuple([_slot(shared, verb, node, value) for value in made])
    new = tuple([slot for slot in slots if slot is not None])
    return NodeShare(
        verb=verb,
        stream=stream,
        classes=shared.touched.by(devices),
        words=words_of(shared.dag, node),
        content=content,
        of=of,
        rows=shared.rows(node) if computes else NO_ROWS,
        axes=shared.axes(node.op.chunk) if isinstance(node.op, Compute) else (),
        slots=slots,
        fresh=() if _may_change(node, content) or len(new) < len(slots) else new,
        given=Role.BATCH in roles or Role.SEED in roles,
        gradients=any(shared.dag.role(value) in PARAMETER_GRADIENTS for value in node.writes),
        early=verb is Verb.RECV and _early(node.op, slots),
        limit=_UNDER_WAY if verb is Verb.SEND else _scatters(shared, node),
        computes=computes,
        communicates=verb in COMMUNICATING,
        moves_value=content is Content.VALUE,
    )


def _slot(shared: PlanContext, verb: Verb, node: Node, value: int) -> Slot | None:
    if shared.dag.role(value) in PARAMETER_GRADIENTS:
        return None
    return shared.slot(verb, value)


def _may_change(node: Node, content: Content | None) -> bool:
    """Whether an instruction may add to a value, or overwrite its input."""
    reduces = isinstance(node.op, Collective) and node.op.kind is Move.ALL_REDUCE
    return reduces or content is Content.GRADIENTS


def _early(op: object, slots: tuple[Slot | None, ...]) -> bool:
    """Whether a message may be received early. A device must send to itself before it receives."""
    small = sum(slot.nbytes for slot in slots if slot is not None) <= _SMALL
    return isinstance(op, Transfer) and small and set(op.source).isdisjoint(op.target)


def _scatters(shared: PlanContext, node: Node) -> int:
    """Limit on reduce-scatters of gradients like this one in progress; 0 if the node is none."""
    if not isinstance(node.op, Collective) or node.op.kind is not Move.REDUCE_SCATTER:
        return 0
    content, of = shared.about(node)
    if content is not Content.GRADIENTS:
        return 0
    return 1 if shared.dag.buckets[of].level > 1 else _UNDER_WAY
