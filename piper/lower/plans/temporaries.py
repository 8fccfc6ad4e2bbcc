"""The memory of an instruction besides its slots: temporary bytes, and the slots that a
communication holds until it ends. Plans state it, so the memory model only adds it up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import PassFacts
from piper.ir.dag.ragged import Ints, Ragged, first_of_each
from piper.ir.dag.sizes import Sizes
from piper.ir.dag.values import Content
from piper.ir.ops import Collective, Compute, Transfer, Update
from piper.ir.overlaps import most_overlaps, scattered
from piper.ir.plan.columns import Columns
from piper.ir.plan.instructions import Instruction, MemoryKind, Slot, Verb
from piper.ir.rules import OptimizerCost


def with_temporaries(
    columns: Columns,
    keys: Sequence[Hashable],
    made: Callable[[Ints], Sequence[Instruction]],
    completed: Callable[[Instruction], Instruction],
) -> Columns:
    """``columns`` with the temporary memory of each instruction. It is the same for instructions
    with equal ``keys``, so the first of each is ``made`` and ``completed``."""
    numbers: dict[Hashable, int] = {}
    which = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    examples = first_of_each(which, len(numbers))
    found = [completed(x) for x in made(examples)]
    pairs = zip(examples.tolist(), found, strict=True)
    own = {pc: x.holds for pc, x in pairs if x.holds not in ((), x.reads)}
    inputs = np.array([x.holds == x.reads for x in found], bool)[which]
    reads = columns.reads
    return replace(
        columns,
        holds=reads.only(np.repeat(inputs, reads.lengths)).followed_by(
            Ragged.sparse(own, len(reads))
        ),
        workspace=np.array([x.workspace for x in found], np.int64)[which],
        beside=np.array([x.beside for x in found], np.int64)[which],
        at_end=np.array([x.at_end for x in found], np.int64)[which],
    )


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Completes instructions over ``slots``. If streams run ``apart``, a communication holds all
    its inputs."""

    dag: Dag
    sizes: Sizes
    optimizer: OptimizerCost
    apart: bool
    slots: tuple[Slot, ...]

    def of(self, x: Instruction) -> Instruction:
        """``x`` with its temporary memory."""
        match x.op:
            case Compute():
                return structs.replace(x, workspace=self._running(x, x.op))
            case Update():
                return structs.replace(x, workspace=self._updating(x))
            case Transfer():
                workspace, beside, after = self._message(x, x.op)
                sends = beside == 0
            case Collective():
                workspace, beside, after, sends = self._collective(x, x.op)
            case _:
                return x
        holds = x.reads
        if x.content is Content.GRADIENTS and not self.apart:
            holds = tuple(slot for slot in x.reads if self.slots[slot].bucket is not None)
        elif not (sends or self.apart):
            holds = ()
        if x.content in (Content.LOAD, Content.OUTPUT):
            holds = (*holds, *x.writes)  # the caller gets them when the step ends
        if not (workspace or beside or after or holds):
            return x
        return structs.replace(x, workspace=workspace, beside=beside, at_end=after, holds=holds)

    def _message(self, x: Instruction, op: Transfer) -> tuple[int, int, int]:
        node, sizes, sends = self.dag.nodes[x.node], self.sizes, x.verb is Verb.SEND
        if op.counts is not None and sends:
            experts = self.dag.model.values[x.of].shape[0]
            each = (experts + 1) * (sizes.nbytes(node.reads[0]) // experts)
            # while it runs, several tensors of 8 bytes per expert
            return 24 * (experts + 2), most_overlaps(*op.parts) * op.replicas[1] * each, 0
        if not sends:
            aside = sizes.sent(node.writes[0]) if scattered(op, sends=False) else 0
            return 0, aside + sizes.copied(node.writes[0]), 0
        (value,) = node.reads
        return 0, sizes.sent(value) if scattered(op, sends=True) else sizes.copied(value), 0

    def _collective(self, x: Instruction, op: Collective) -> tuple[int, int, int, bool]:
        """Bytes while it runs, until it ends, and at its end; and whether it sends its input itself
        and not a copy."""
        node, sizes, by_count = self.dag.nodes[x.node], self.sizes, op.rows is not None
        if x.content is Content.GRADIENTS:
            return 0, self._reducing(x, op), 0, False
        if x.content is not Content.VALUE:
            return 0, 0, 0, False
        if op.dispatches:
            rows = self.slots[x.writes[0]].nbytes
            copied = sizes.copied(node.reads[0])
            if op.runs > 1:  # merged rows, or counts summed over runs
                copied = sizes.sent(node.reads[0]) if by_count else sizes.nbytes(node.writes[0])
            merging = self._merging(x) if op.runs > 1 and by_count else 0
            beside = copied + 2 * rows * op.padded  # to send and receive, with row positions
            return merging, beside, 0 if by_count else rows, copied == 0
        if op.combines:
            rows, copied = self.slots[x.reads[0]].nbytes, sizes.copied(node.writes[0])
            after = 0
            if op.runs > 1:
                after = self.slots[x.writes[0]].nbytes + self._merging(x)
            beside = copied + (2 * rows * op.padded if by_count else rows)
            return 0, beside, after, by_count and copied == 0
        moves = op.kind is not Move.ALL_REDUCE  # an all-reduce works on a copy
        copied = sizes.copied(node.reads[0]) if moves else 0
        copied += sizes.copied(node.writes[0])
        return 0, copied, 0, moves and copied == 0

    def _reducing(self, x: Instruction, op: Collective) -> int:
        """Bytes of a bucket's gradients in one buffer, if it is not the result itself, and of the
        sum to be added."""
        there = any(self.slots[slot].bucket == x.of for slot in x.reads)
        scatters = op.kind is Move.REDUCE_SCATTER
        if there or not (x.adds or scatters):
            return 0
        whole = self.sizes.whole(x.of) * self.dag.buckets[x.of].gradient.itemsize
        return whole + (sum(self.slots[slot].nbytes for slot in x.adds) if scatters else 0)

    def _merging(self, x: Instruction) -> int:
        """Bytes needed to compute the order in which sorted ranges of rows are merged."""
        node = self.dag.nodes[x.node]
        model = self.sizes.models.get(node.parts, self.dag.model)
        counts = self.sizes.nbytes(
            node.reads[1]
        )  # at least 4 bytes each; two 8-byte copies for a while
        return 29 * model.values[x.of].shape[0] + 4 * counts

    def _updating(self, x: Instruction) -> int:
        cost = self.optimizer
        each = [self.sizes.updating(b, cost.update, together=cost.together) for b in x.buckets]
        return sum(each) if cost.together else max(each, default=0)

    def _running(self, x: Instruction, op: Compute) -> int:
        """Bytes that a pass needs. Its first gradients are copied to where they accumulate."""
        facts = self.sizes.facts(op, x.rows.parts)
        added = sum([self.slots[slot].nbytes for slot in x.adds])
        eased = max(0, facts.eased - self._kept(x, facts)) if facts.eased else 0
        running = facts.workspace - eased + added
        copied = sum([self._put(x, slot) for slot in x.writes if slot not in x.adds])
        if copied == 0:
            return running
        freed = [self.slots[slot] for slot in x.frees]
        gone = sum(slot.nbytes for slot in freed if slot.holder is MemoryKind.SAVED)
        return max(running + facts.housed, added + copied - gone)  # during the pass, and after it

    def _put(self, x: Instruction, number: int) -> int:
        """Bytes of the first gradients before they are copied to the memory where they
        accumulate."""
        slot = self.slots[number]
        if number in x.allocates:
            return slot.nbytes
        return slot.nbytes - slot.own if slot.lies_in else 0

    def _kept(self, x: Instruction, facts: PassFacts) -> int:
        """Bytes read here that no later pass of the chunk reads, but that another node on the
        device still needs, such as a seed that all microbatches read."""
        read = zip(facts.reads, x.reads, strict=False)
        kept = {slot for ref, slot in read if ref in facts.last}.difference(x.frees)
        return sum(self.slots[slot].nbytes for slot in kept)
