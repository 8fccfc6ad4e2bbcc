"""The memory of a plan over time: persistent state, slots from when they are written until they are
freed, and the workspace of each instruction while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import PassFacts
from piper.ir.dag.sizes import Sizes
from piper.ir.dag.values import ExtraRole
from piper.ir.ops import Collective, Compute, Transfer, Update
from piper.ir.overlaps import most_overlaps, scattered
from piper.ir.plan.instructions import BESIDE, Instruction, MemoryKind, Slot, Verb
from piper.ir.plan.memory import Memory
from piper.ir.plan.plan import Plan
from piper.ir.rules import OptimizerCost

_REPORTED = (ExtraRole.LOAD, ExtraRole.OUTPUT)
"""Values that are kept for the caller until the step ends."""


def memory_of(
    dag: Dag, plan: Plan, sizes: Sizes, optimizer: OptimizerCost, *, apart: bool = False
) -> Memory:
    """An upper bound on the memory of ``plan``. If streams run ``apart``, a communication holds its
    inputs until it ends."""
    mine = plan.devices[0]
    buckets = [
        i for i, bucket in enumerate(dag.buckets) if any(mine in group for group in bucket.groups)
    ]
    parameters = sum(sizes.state(i) for i in buckets)
    kept = sum(_optimizer(dag, sizes, i, optimizer) for i in buckets)
    slots = plan.slots
    book = _Book(
        {
            MemoryKind.PARAMETERS: parameters,
            MemoryKind.OPTIMIZER: kept,
            MemoryKind.BUFFERS: _buffers(dag, plan),
        }
    )
    live = set(plan.first_slots)
    for slot in live:
        book.add(slots[slot].holder, slots[slot].own)
    book.look(-1)
    over_time = []
    way = _UnderWay(plan, apart=apart)
    for pc, x in enumerate(plan.instructions):
        for other in x.ends:
            book.look(pc, _unpacked(dag, plan, sizes, plan.instructions[other]))
            for holder, nbytes in way.end(other):
                book.add(holder, -nbytes)
        for slot in (*x.allocates, *x.writes):
            if slot not in live:
                live.add(slot)
                book.add(slots[slot].holder, slots[slot].own)
        if x.verb in BESIDE:
            beside = _beside(dag, plan, sizes, x)
            book.add(MemoryKind.COMMUNICATION, beside)
            way.begin(pc, x, beside, copies=_copied(dag, sizes, x) > 0)
        book.look(pc, _workspace(dag, plan, sizes, x, optimizer))
        beside_it = book.total
        for slot in x.frees:
            live.remove(slot)
            reported = x.role in _REPORTED and slot in x.writes
            if not reported and not way.keeps(slot):
                book.add(slots[slot].holder, -slots[slot].own)
        over_time.append((beside_it, book.total))
    at_peak = {holder: book.at_peak.get(holder, 0) for holder in MemoryKind}
    return Memory(plan.devices, parameters, kept, book.peak, book.at, at_peak, tuple(over_time))


def _optimizer(dag: Dag, sizes: Sizes, bucket: int, cost: OptimizerCost) -> int:
    held = dag.buckets[bucket]
    scalars = cost.scalars * len(held.parameters) if held.trained else 0
    return sizes.optimizer(bucket, cost.state) + scalars


def _buffers(dag: Dag, plan: Plan) -> int:
    """Bytes of the buffers and constants that the passes of a plan read."""
    chunks = {x.op.chunk for x in plan.instructions if isinstance(x.op, Compute)}
    names = {name for chunk in chunks for name in dag.model.chunks[chunk].buffers}
    return sum(dag.model.buffers.get(name, 0) for name in names)


class _Book:
    """Bytes in use by memory kind, and their peak."""

    def __init__(self, held: Mapping[MemoryKind, int]) -> None:
        self.held = {**dict.fromkeys(MemoryKind, 0), **held}
        self.total = sum(held.values())
        self.peak, self.at = -1, -1
        self.at_peak: Mapping[MemoryKind, int] = {}

    def add(self, holder: MemoryKind, nbytes: int) -> None:
        self.held[holder] += nbytes
        self.total += nbytes

    def look(self, pc: int, workspace: int = 0) -> None:
        """Update the peak with the bytes in use now plus ``workspace``."""
        if self.total + workspace > self.peak:
            self.peak, self.at = self.total + workspace, pc
            self.at_peak = {**self.held, MemoryKind.WORKSPACE: workspace}


class _UnderWay:
    """Communications in progress, and the memory that they hold until they end."""

    def __init__(self, plan: Plan, *, apart: bool) -> None:
        self._slots = plan.slots
        self._apart = apart
        self._over = {c: pc for pc, x in enumerate(plan.instructions) for c in x.ends}
        self._held: dict[int, list[tuple[MemoryKind, int]]] = {}
        self._sends: dict[int, list[int]] = {}

    def begin(self, pc: int, x: Instruction, beside: int, *, copies: bool) -> None:
        """Start a communication. With ``copies`` it sends a contiguous copy of its input."""
        self._held[pc] = [(MemoryKind.COMMUNICATION, beside)]
        goes = x.verb is Verb.SEND or x.role is ExtraRole.DISPATCHED or _moves(x) or _by_count(x)
        sends = goes and not copies
        for slot in x.reads:
            reduced = x.role is ExtraRole.REDUCED and self._slots[slot].bucket is not None
            if sends or reduced or self._apart:
                self._sends.setdefault(slot, []).append(pc)

    def keeps(self, slot: int) -> bool:
        """Whether a freed slot stays in memory until a communication has sent it."""
        senders = [pc for pc in self._sends.pop(slot, ()) if pc in self._held]
        if senders:
            last = max(senders, key=lambda pc: self._over.get(pc, math.inf))
            self._held[last].append((self._slots[slot].holder, self._slots[slot].own))
        return bool(senders)

    def end(self, pc: int) -> list[tuple[MemoryKind, int]]:
        return self._held.pop(pc)


def _beside(dag: Dag, plan: Plan, sizes: Sizes, x: Instruction) -> int:
    """Bytes that a communication holds until it ends, besides its inputs and outputs."""
    if x.role is ExtraRole.REDUCED:
        # all gradients are in one buffer, which is the result itself for an all-reduce
        there = any(plan.slots[slot].bucket == x.of for slot in x.reads)
        added = sum(plan.slots[slot].nbytes for slot in x.adds)
        if there or not (x.adds or sizes.sharded(x.of)):
            return 0
        whole = sizes.whole(x.of) * dag.buckets[x.of].gradient.itemsize
        return whole + (added if sizes.sharded(x.of) else 0)
    if isinstance(x.op, Collective) and x.op.padded:  # send and receive buffers, row positions
        rows = x.reads[0] if x.role is ExtraRole.UNCOMBINED else x.writes[0]
        return 2 * plan.slots[rows].nbytes + _copied(dag, sizes, x)
    if x.role is ExtraRole.UNCOMBINED and not _by_count(x):  # a reordered copy of its rows
        return plan.slots[x.reads[0]].nbytes + _copied(dag, sizes, x)
    return _copied(dag, sizes, x)


def _copied(dag: Dag, sizes: Sizes, x: Instruction) -> int:
    """Bytes of the contiguous copy that messages carry of a value that is not contiguous: expanded,
    transposed, or in several parts."""
    node = dag.nodes[x.node]
    if isinstance(x.op, Transfer) and x.op.counts is not None and x.verb is Verb.SEND:
        each = (_experts(dag, x) + 1) * (sizes.nbytes(node.reads[0]) // _experts(dag, x))
        return most_overlaps(*x.op.parts) * x.op.replicas[1] * each
    if _merges(x) and x.role is ExtraRole.DISPATCHED:  # rows, or counts summed over runs
        return sizes.sent(node.reads[0]) if _by_count(x) else sizes.nbytes(node.writes[0])
    if isinstance(x.op, Transfer) and scattered(x.op, sends=x.verb is Verb.SEND):
        if x.verb is Verb.SEND:
            return sizes.sent(node.reads[0])
        return sizes.sent(node.writes[0]) + sizes.copied(node.writes[0])
    if x.verb is Verb.RECV or x.role is ExtraRole.UNCOMBINED:
        return sizes.copied(node.writes[0])
    if x.verb is Verb.SEND or x.role is ExtraRole.DISPATCHED:
        return sizes.copied(node.reads[0])
    if x.role is ExtraRole.REDISTRIBUTED:
        taken = sizes.copied(node.reads[0]) if _moves(x) else 0
        return taken + sizes.copied(node.writes[0])
    return 0


def _moves(x: Instruction) -> bool:
    """Whether a redistribution sends its input itself: an all-reduce works on a copy."""
    if x.role is not ExtraRole.REDISTRIBUTED or not isinstance(x.op, Collective):
        return False
    return x.op.kind is not Move.ALL_REDUCE


def _by_count(x: Instruction) -> bool:
    """Whether it sends rows by count, in their present order."""
    return isinstance(x.op, Collective) and x.op.rows is not None


def _merges(x: Instruction) -> bool:
    """Whether it merges rows of several sorted ranges."""
    return isinstance(x.op, Collective) and x.op.runs > 1


def _experts(dag: Dag, x: Instruction) -> int:
    """The number of experts whose row counts are sent."""
    return dag.model.values[x.of].shape[0]


def _merging(dag: Dag, sizes: Sizes, x: Instruction) -> int:
    """Bytes needed to compute the order in which sorted ranges of rows are merged."""
    assert isinstance(x.op, Collective)
    node = dag.nodes[x.node]
    model = sizes.models.get(node.parts, dag.model)
    counts = sizes.nbytes(node.reads[1])  # at least 4 bytes each; two 8-byte copies for a while
    return 29 * model.values[x.of].shape[0] + 4 * counts


def _unpacked(dag: Dag, plan: Plan, sizes: Sizes, x: Instruction) -> int:
    """Bytes that a communication needs in addition at its end, to reorder the received rows."""
    if _merges(x) and x.role is ExtraRole.UNCOMBINED:
        return plan.slots[x.writes[0]].nbytes + _merging(dag, sizes, x)
    in_order = x.role is not ExtraRole.DISPATCHED or _by_count(x)
    return 0 if in_order else plan.slots[x.writes[0]].nbytes


def _workspace(dag: Dag, plan: Plan, sizes: Sizes, x: Instruction, optimizer: OptimizerCost) -> int:
    """Bytes that an instruction needs while it runs, besides its inputs and outputs."""
    if isinstance(x.op, Update):
        each = [
            sizes.updating(bucket, optimizer.update, together=optimizer.together)
            for bucket in x.buckets
        ]
        return sum(each) if optimizer.together else max(each, default=0)
    if isinstance(x.op, Transfer) and x.op.counts is not None and x.verb is Verb.SEND:
        return 24 * (_experts(dag, x) + 2)  # several tensors of 8 bytes per expert
    if _merges(x) and x.role is ExtraRole.DISPATCHED and _by_count(x):
        return _merging(dag, sizes, x)
    if not isinstance(x.op, Compute):
        return 0
    facts = sizes.facts(x.op, len(x.group))
    added = sum(plan.slots[slot].nbytes for slot in x.adds)
    eased = max(0, facts.eased - _kept(plan, x, facts))
    running = facts.workspace - eased + added
    copied = sum(_put(x, slot, plan.slots[slot]) for slot in x.writes if slot not in x.adds)
    if copied == 0:
        return running
    freed = [plan.slots[slot] for slot in x.frees]
    gone = sum(slot.nbytes for slot in freed if slot.holder is MemoryKind.SAVED)
    return max(running + facts.housed, added + copied - gone)  # during the pass, and after it


def _put(x: Instruction, number: int, slot: Slot) -> int:
    """Bytes of the first gradients before they are copied to the memory where they accumulate."""
    if number in x.allocates:
        return slot.nbytes
    return slot.nbytes - slot.own if slot.lies_in else 0


def _kept(plan: Plan, x: Instruction, facts: PassFacts) -> int:
    """Bytes read here that no later pass of the chunk reads, but that another node on the device
    still needs, such as a seed that all microbatches read."""
    read = zip(facts.reads, x.reads, strict=False)
    kept = {slot for ref, slot in read if ref in facts.last}.difference(x.frees)
    return sum(plan.slots[slot].nbytes for slot in kept)
