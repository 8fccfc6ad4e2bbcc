"""A device's share of the nodes of one kind: all that their instructions have in common. A kind has
one share, a transfer two: to send and to receive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from piper.ir.collectives import Move
from piper.ir.dag.dag import Node, words_of
from piper.ir.dag.ragged import Bools, Ints, Ragged
from piper.ir.dag.values import PARAMETER_GRADIENTS, Content, Role
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.ops import Add, Collective, Compute, Group, Select, Transfer
from piper.ir.plan.columns import VERBS
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
    given: bool
    """Whether it reads tensors of the batch, or seeds."""
    early: bool
    """Whether it receives a message so small that it may be received early."""
    limit: int
    """How many of these may be in progress on a stream; 0 for no limit."""
    in_turn: bool
    """Whether it may read row counts that its own stream delivers just before."""
    overwrites: bool
    """Whether it may overwrite its input with its result."""

    @property
    def alone(self) -> bool:
        """Whether it updates parameters, or communicates state or scalars."""
        return self.verb is Verb.UPDATE or self.content not in (None, Content.VALUE)


class ShareTable:
    """The shares of all nodes, as arrays by number."""

    def __init__(self, shared: PlanContext) -> None:
        classes = len(shared.touched.classes.members)
        kinds = shared.dag.kinds
        self._node_kinds = kinds.of
        self._of = np.full((classes, len(kinds.examples), 2), -1)
        """By class and kind; a class may send and receive."""
        self.shares: list[NodeShare] = []
        for kind, node in enumerate(shared.dag.examples):
            for side, share in enumerate(shares_of(shared, node)):
                self._of[list(share.classes), kind, side] = len(self.shares)
                self.shares.append(share)
        slots: EqualNumbers[Slot] = EqualNumbers()
        self.kinds = Ragged.of(
            [[-1 if s is None else slots.of(s) for s in x.slots] for x in self.shares]
        )
        """For each value that is made, its slot in ``slots``; -1 for gradients of parameters."""
        self.slots = slots.values
        streams: EqualNumbers[str] = EqualNumbers()
        self.streams = np.array([streams.of(x.stream) for x in self.shares], np.int64)
        self.verbs = np.array([VERBS.index(x.verb) for x in self.shares], np.int64)
        self.limits = np.array([x.limit for x in self.shares], np.int64)
        self.alone = self._flags(lambda x: x.alone)
        self.computes = self._flags(lambda x: x.verb is Verb.COMPUTE)
        self.communicates = self._flags(lambda x: x.verb in COMMUNICATING)
        self.reads = self._flags(lambda x: x.verb is not Verb.RECV and not x.alone)
        """Whether they read all that the node reads."""
        self.writes = self._flags(lambda x: x.verb is not Verb.SEND)
        self.given = self._flags(lambda x: x.given)
        self.early = self._flags(lambda x: x.early)
        self.overwrites = self._flags(lambda x: x.overwrites)
        self.in_turn = self._flags(lambda x: x.in_turn)

    def _flags(self, of: Callable[[NodeShare], bool]) -> Bools:
        return np.array([of(x) for x in self.shares], bool)

    def rows(self, c: int, order: Ints) -> tuple[Ints, Ints]:
        """The nodes among ``order`` in which a class takes part, and its shares of them."""
        kinds = self._node_kinds[order]
        here = (self._of[c] >= 0).any(axis=1)[kinds]
        order, found = order[here], self._of[c][kinds[here]]
        there = found >= 0
        return np.repeat(order, 2)[there.ravel()], found[there]


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
        given=Role.BATCH in roles or Role.SEED in roles,
        early=verb is Verb.RECV and _early(node.op, slots),
        limit=_UNDER_WAY if verb is Verb.SEND else _scatters(shared, node),
        in_turn=isinstance(node.op, Collective) and node.op.in_turn,
        overwrites=_overwrites(shared, node, content),
    )


def _slot(shared: PlanContext, verb: Verb, node: Node, value: int) -> Slot | None:
    if shared.dag.role(value) in PARAMETER_GRADIENTS:
        return None
    return shared.slot(verb, value)


def _overwrites(shared: PlanContext, node: Node, content: Content | None) -> bool:
    if not isinstance(node.op, Collective) or node.op.kind is not Move.ALL_REDUCE:
        return False
    return content is Content.GRADIENTS or (
        content is Content.VALUE and shared.private(node.reads[0])
    )


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
