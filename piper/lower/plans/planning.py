"""Makes the plan of each rank equivalence class from the issue order.

A plan lists the instructions of its class over its own slots: what each instruction waits for,
where gradients accumulate, and which slots are freed after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.node_kinds import NodeKinds
from piper.ir.dag.sizes import Sizes
from piper.ir.dag.values import Content
from piper.ir.ops import Collective, Group
from piper.ir.plan.instructions import Instruction, Returned, RowShards, Slot, Verb
from piper.ir.plan.issue_order import IssueOrder
from piper.ir.plan.plan import Plan
from piper.ir.plan.rank_classes import RankClasses, takes_every_copy
from piper.ir.rules import OptimizerCost
from piper.lower.communication.sorted_rows import brought_in_turn
from piper.lower.plans.accumulation import Accumulation
from piper.lower.plans.plan_context import PlanContext, Touched
from piper.lower.plans.shares import NodeShare, shares_of
from piper.lower.plans.step_inputs import StepInputs
from piper.lower.plans.temporaries import Temporaries
from piper.lower.plans.waits import Held, Waits

_Part = tuple[int, NodeShare, Sequence[int], Sequence[int]]
"""A class's share of a node: the node, values read, values made."""


def plans_of(
    dag: Dag,
    kinds: NodeKinds,
    classes: RankClasses,
    order: IssueOrder,
    sizes: Sizes,
    optimizer: OptimizerCost,
    *,
    gpu: bool = False,
) -> tuple[Plan, ...]:
    """The plan of each rank class. If the optimizer steps as a whole, the last update of a device
    takes the step for all its buckets; otherwise each update steps its own bucket. On a ``gpu``,
    communications run apart and hold their inputs."""
    shared = PlanContext(dag, sizes, Touched(classes), optimizer, gpu)
    shares = [shares_of(shared, node) for node in kinds.nodes]
    rows: list[list[tuple[int, NodeShare]]] = [[] for _ in classes.members]
    for number in order.order:
        for share in shares[kinds.of[number]]:
            for c in share.classes:
                rows[c].append((number, share))
    return tuple(
        _Planner(shared, members).plan(row)
        for members, row in zip(classes.members, rows, strict=True)
    )


def _buffer(reduced: int) -> int:
    """The number that stands for the gradient accumulation buffer of the reduction that makes
    ``reduced``: negative, so it differs from every value."""
    return -1 - reduced


class _Planner:
    """Allocates slots to values over the step, for one rank class."""

    def __init__(self, shared: PlanContext, members: Group) -> None:
        self.shared = shared
        self.dag = shared.dag
        self.members = members
        self.me = shared.touched.classes.of[members[0]]
        self.sums = shared.sums
        self.kinds: list[Slot] = []
        self.accumulation = Accumulation(shared.dag, shared.sizes)
        self.temporaries = Temporaries(
            shared.dag, shared.sizes, shared.optimizer, shared.gpu, self.kinds
        )
        self.temporary: dict[tuple[object, ...] | None, tuple[int, int, int, bool]] = {}
        """Of instructions that need the same temporary memory: bytes while it runs, until it ends,
        at its end, and whether it holds its inputs."""
        self.live: dict[int, Held] = {}
        """By value, or by the number of a buffer (``_buffer``)."""
        self.inputs = StepInputs(shared, members, self._new)
        self.waits = Waits()
        self.out: list[Instruction] = []
        self.reads: Counter[int] = Counter()
        """How often each value is read."""
        self.last_read: dict[int, int] = {}
        """The last instruction that reads a value."""
        self.returned: dict[int, RowShards] = {}
        """Values returned to the caller at the end of the step, and the devices that shard their
        rows."""
        self.updates: list[int] = []
        """The updated buckets, in order."""
        self.computed = 0
        """The program counter of the last computation."""

    def plan(self, row: list[tuple[int, NodeShare]]) -> Plan:
        self.inputs.add(number for number, share in row if share.given)
        parts = [self._part(number, share) for number, share in row]
        self.reads.update(chain.from_iterable([reads for _, _, reads, _ in parts]))
        for pc, (_, _, reads, _) in enumerate(parts):
            self.last_read.update(dict.fromkeys(reads, pc))
        for value in self._outputs(row):
            self.reads[value] += 1
            self.last_read[value] = len(parts)
            self.returned[value] = self.shared.rows(self.dag.nodes[self.dag.producers[value]])
        for part in parts:
            self._emit(*part)
        returned = tuple(self._return(value, rows) for value, rows in self.returned.items())
        assert not self.live, "every value is read, or freed where it is made"
        out, given, kinds = tuple(self.out), tuple(self.inputs.given), tuple(self.kinds)
        return Plan(self.members, out, given, self.inputs.seeds, kinds, returned)

    def _outputs(self, row: list[tuple[int, NodeShare]]) -> list[int]:
        """The outputs that have rows and that this class makes and returns."""
        values = self.dag.model.values
        wanted = [of for of in self.dag.model.outputs if values[of].shape]
        made = {value for of in wanted for value in self.dag.activations(of)}
        in_order = (
            v for number, _ in (row if wanted else ()) for v in self.dag.nodes[number].writes
        )
        return self._mine(tuple(dict.fromkeys(value for value in in_order if value in made)))

    def _return(self, value: int, rows: RowShards) -> Returned:
        template, microbatch = self.dag.table.value(value)
        return Returned(self.live.pop(value)[0], template.of, microbatch, rows)

    def _part(self, number: int, share: NodeShare) -> _Part:
        """The values that an instruction reads and makes. The first value of a sum stands for all
        values that accumulate in the same slot."""
        node, verb = self.dag.nodes[number], share.verb
        reads: Sequence[int] = node.reads
        writes: Sequence[int] = node.writes
        if verb is Verb.COMPUTE:
            if share.given:
                same = self.inputs.same
                reads = [same.get(value, value) for value in reads]
            if share.gradients:
                writes = self._leaders(writes)
                self.accumulation.add(verb, reads, writes)
        elif verb is Verb.SEND:
            writes = ()
        elif verb is Verb.RECV:
            reads = ()
        elif verb is Verb.UPDATE or (verb is Verb.COLLECTIVE and not share.moves_value):
            reads = self._leaders(self._mine(reads, alike=takes_every_copy(self.dag, node)))
            if verb is Verb.UPDATE:
                self.updates.append(share.of)
            else:
                writes = self._leaders(writes)
                if self.accumulation.add(verb, reads, writes):
                    reads = [*reads, _buffer(writes[0])]
        return number, share, reads, writes

    def _leaders(self, values: Iterable[int]) -> list[int]:
        return [*dict.fromkeys([self.sums.get(v, v) for v in values])]

    def _mine(self, values: Iterable[int], *, alike: bool = False) -> list[int]:
        """The ``values`` that this class makes and contributes: only the first of equal copies,
        unless copies are summed ``alike``. A device of a replica group that computes no part of a
        sum joins the reduction without input."""
        nodes, producers, by = self.dag.nodes, self.dag.producers, self.shared.touched.by
        made = ((value, nodes[producers[value]]) for value in values if value in producers)
        return [
            value
            for value, maker in made
            if self.me in by(maker.devices)
            and (alike or self.dag.copy_of(maker, maker.devices.index(self.members[0])) == 0)
        ]

    def _new(self, value: int, kind: Slot) -> int:
        slot = len(self.kinds)
        self.live[value] = slot, ()
        self.kinds.append(kind)
        return slot

    def _emit(
        self, number: int, share: NodeShare, reads: Sequence[int], writes: Sequence[int]
    ) -> None:
        node, live, pc = self.dag.nodes[number], self.live, len(self.out)
        inputs = [live[value] for value in reads]
        read = tuple([slot for slot, _ in inputs])
        adds: tuple[int, ...] = ()
        allocates: list[int] = []
        before: list[int] = []
        if share.fresh:
            written = tuple(range(len(self.kinds), len(self.kinds) + len(share.slots)))
            self.kinds += share.fresh
        else:
            added = [live[value] for value in writes if value in live]
            inputs += added
            adds = tuple([slot for slot, _ in added])
            for value, kind in zip(writes, share.slots, strict=True):
                if value not in live:
                    self._write(share, node, value, kind, reads, before, allocates)
            written = tuple([live[value][0] for value in writes])
        in_turn = brought_in_turn(self.dag, node) if share.moves_value else None
        waits, ends = self.waits.issue(number, share, inputs, before, node.after, in_turn)
        for value, slot in zip(writes, written, strict=True):
            made = () if share.fresh else live[value][1]
            live[value] = slot, self.waits.last_of_each(made, share.stream) if made else (pc,)
        frees = self._frees(pc, reads, writes)
        alike = self._alike(share, read, written, adds, frees) if not allocates else None
        workspace, beside, at_end, holds = self.temporary.get(alike, (0, 0, 0, False))
        x = Instruction(
            share.verb,
            number,
            self.shared.name(number, share.words),
            share.stream,
            node.op,
            share.content,
            share.of,
            share.rows,
            read,
            written,
            adds,
            tuple(allocates),
            frees,
            waits,
            ends,
            () if alike else self._buckets(share.verb, share.content, share.of, reads),
            share.axes,
            () if alike else self._weights(share.content, reads),
            workspace,
            beside,
            at_end,
            read if holds else (),
            self.computed if share.early and not waits else None,
        )
        if alike not in self.temporary:
            x = self.temporaries.of(x)
            if alike is not None:
                self.temporary[alike] = x.workspace, x.beside, x.at_end, bool(x.holds)
        self.out.append(x)
        if share.computes:
            self.computed = pc

    def _alike(
        self,
        share: NodeShare,
        read: tuple[int, ...],
        written: tuple[int, ...],
        adds: tuple[int, ...],
        frees: tuple[int, ...],
    ) -> tuple[object, ...] | None:
        """Equal for instructions that need the same temporary memory; None if it is not known which
        do. None also for whatever steps buckets or weighs losses."""
        if share.moves_value:
            return (share,)
        if not share.computes:
            return None
        slots = (*read, *written, *adds) if share.gradients else read
        kinds = self.kinds
        return share, *[id(kinds[slot]) for slot in slots], *[slot in frees for slot in slots]

    def _write(
        self,
        share: NodeShare,
        node: Node,
        value: int,
        kind: Slot | None,
        reads: Sequence[int],
        before: list[int],
        allocates: list[int],
    ) -> None:
        """Allocate a slot for ``value``, or reuse an input's slot for a change in place. For the
        first gradients of a sum, also allocate the memory in which they accumulate."""
        summed = self.accumulation
        if self._in_place(share, node, reads):
            self.live[value] = self.live.pop(reads[-1])[0], ()
        elif kind is not None:
            self._new(value, kind)
        else:
            for made in summed.buffers(value):
                buffer = _buffer(made)
                if buffer in self.live:  # made earlier, or for another value of this instruction
                    before += [pc for pc in self.live[buffer][1] if pc < len(self.out)]
                else:
                    allocates.append(self._new(buffer, summed.buffer(made)))
                    self.live[buffer] = allocates[-1], (len(self.out),)
            lies_in = tuple(self.live[_buffer(made)][0] for made in summed.buffers(value))
            alone = summed.repeated(value) and value in self.last_read and not lies_in
            slot = self._new(value, summed.slot(value, lies_in, alone=alone))
            if alone:
                allocates.append(slot)

    def _in_place(self, share: NodeShare, node: Node, reads: Sequence[int]) -> bool:
        """Whether a node overwrites its last input with its result."""
        if not isinstance(node.op, Collective) or node.op.kind is not Move.ALL_REDUCE or not reads:
            return False
        if share.moves_value:
            return self.reads[reads[0]] == 1 and self.shared.private(reads[0])
        # a buffer, or a sum that is not yet over all copies
        return share.content is Content.GRADIENTS and not 0 <= reads[-1] < self.dag.first_extra

    def _buckets(
        self, verb: Verb, content: Content | None, of: int, reads: Sequence[int]
    ) -> tuple[int, ...]:
        """The buckets that the optimizer steps here, or whose gradients the norm covers."""
        if verb is Verb.UPDATE:
            if not self.shared.optimizer.whole:
                return (of,)
            return tuple(self.updates) if of == self.updates[-1] else ()
        if content is not Content.NORM:
            return ()
        updated = any(self.shared.content(value) is Content.SQUARES for value in reads)
        return () if updated else tuple(self.updates)

    def _weights(self, content: Content | None, reads: Sequence[int]) -> tuple[float, ...]:
        """The weights of the losses among ``reads``. A loss whose rows are sharded over fewer
        devices than others' weighs more, unless losses are sums. Other outputs are averaged."""
        if content is Content.OUTPUT:
            microbatches = self.dag.microbatches[1] if self.dag.microbatches else 1
            makers = [self.dag.nodes[self.dag.producers[v]] for v in reads]
            return tuple(1 / (microbatches * maker.parts) for maker in makers)
        if content is not Content.LOSS:
            return ()
        if self.dag.model.count is not None:
            return (1.0,) * (len(reads) // 2)
        nodes, producers = self.dag.nodes, self.dag.producers
        return tuple(self.shared.largest_loss / nodes[producers[v]].parts for v in reads)

    def _frees(self, pc: int, reads: Sequence[int], writes: Sequence[int]) -> tuple[int, ...]:
        """The slots of values without remaining reads."""
        last = self.last_read
        gone = [value for value in reads if last[value] == pc]
        gone += [value for value in writes if last.get(value, -1) <= pc]
        # a value that is overwritten in place is not live any more
        return tuple([self.live.pop(value)[0] for value in gone if value in self.live])
