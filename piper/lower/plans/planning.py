"""Makes the plan of each rank equivalence class from the issue order.

A plan lists the instructions of its class over its own slots: what each instruction waits for,
where gradients accumulate, and which slots are freed after it. All instructions of a class are
planned at once, in arrays. Only those that reduce gradients or update parameters, and the first
gradients of a sum, are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from piper.ir.dag.dag import Dag
from piper.ir.dag.ragged import Bools, Ints, Ragged, first_of_each
from piper.ir.dag.sizes import Sizes
from piper.ir.dag.values import Content
from piper.ir.ops import Group, Update
from piper.ir.plan.columns import Columns, PlannedInstructions
from piper.ir.plan.instructions import Instruction, Returned, RowShards, Verb
from piper.ir.plan.issue_order import IssueOrder
from piper.ir.plan.plan import Plan
from piper.ir.plan.rank_classes import RankClasses, takes_every_copy
from piper.ir.rules import OptimizerCost
from piper.lower.communication.sorted_rows import brought_in_turn
from piper.lower.plans.accumulation import Accumulation
from piper.lower.plans.plan_context import PlanContext, Touched
from piper.lower.plans.shares import NodeShare, ShareTable
from piper.lower.plans.slot_allocation import SlotAllocation
from piper.lower.plans.step_inputs import StepInputs
from piper.lower.plans.temporaries import Temporaries, with_temporaries
from piper.lower.plans.waits import Issued, waits_of


def plans_of(
    dag: Dag,
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
    table = ShareTable(shared)
    nodes = np.array(order.order, np.int64)
    return tuple(
        _Planner(shared, table, members, *table.rows(c, nodes)).plan()
        for c, members in enumerate(classes.members)
    )


@dataclass(slots=True)
class _Maker:
    """Makes the instructions of a plan."""

    shared: PlanContext
    shares: list[NodeShare]
    columns: Columns
    early: Ints
    """-1 for none."""
    buckets: dict[int, tuple[int, ...]]
    weights: dict[int, tuple[float, ...]]

    def all(self) -> tuple[Instruction, ...]:
        return self.of(np.arange(len(self.shares)))

    def of(self, pcs: Ints) -> tuple[Instruction, ...]:
        shared, x = self.shared, self.columns
        slots = (x.reads, x.writes, x.adds, x.allocates, x.frees, x.waits, x.ends, x.holds)
        numbers = (pcs, x.nodes[pcs], x.workspace[pcs], x.beside[pcs], x.at_end[pcs])
        made = []
        for row in zip(
            *[column.tolist() for column in (*numbers, self.early[pcs])],
            *[column.take(pcs).tuples() for column in slots],
            strict=True,
        ):
            pc, number, workspace, beside, at_end, early, *row_slots = row
            reads, writes, adds, allocates, frees, waits, ends, holds = row_slots
            share, node = self.shares[pc], shared.dag.nodes[number]
            made.append(
                Instruction(
                    share.verb,
                    number,
                    shared.name(number, share.words),
                    share.stream,
                    node.op,
                    share.content,
                    share.of,
                    share.rows,
                    reads,
                    writes,
                    adds,
                    allocates,
                    frees,
                    waits,
                    ends,
                    self.buckets.get(pc, ()),
                    share.axes,
                    self.weights.get(pc, ()),
                    workspace,
                    beside,
                    at_end,
                    holds,
                    None if early < 0 else early,
                )
            )
        return tuple(made)


class _Planner:
    """Plans the instructions of one rank class. ``ids`` are their shares in ``table``."""

    def __init__(
        self, shared: PlanContext, table: ShareTable, members: Group, nodes: Ints, ids: Ints
    ) -> None:
        self.shared, self.dag, self.table = shared, shared.dag, table
        self.members, self.me = members, shared.touched.classes.of[members[0]]
        self.nodes, self.ids = nodes, ids
        self.alone = np.flatnonzero(table.alone[ids]).tolist()
        self.accumulation = Accumulation(shared.dag, shared.sizes)
        self.slots = SlotAllocation(shared, table.slots, self.accumulation)
        self._counts: dict[int, bool] = {}
        """Whether this class contributes the first of equal copies, by kind."""
        self.updates: list[int] = []
        """The updated buckets, in order."""

    def plan(self) -> Plan:
        table, ids, slots, count = self.table, self.ids, self.slots, len(self.ids)
        inputs = StepInputs(self.shared, self.members, slots.new)
        inputs.add(self.nodes[table.given[ids]].tolist())
        reads, writes = self._values(inputs.same)
        returned = self._returned(writes)
        last_read = np.full(self.shared.numbered, -1)
        last_read[reads.items] = reads.row_of
        last_read[list(returned)] = count
        made, pcs = writes.items, writes.row_of
        first = first_of_each(made, self.shared.numbered)[made] == np.arange(len(made))
        new = first | (last_read[made] < pcs)
        over = new & self._overwrites(reads, returned)[pcs]
        inputs_over = reads.starts[1:][pcs[over]] - 1

        allocated = slots.allocate(writes, table.kinds.take(ids).items, new & ~over, last_read)
        slots.reuse(made[over], reads.items[inputs_over])
        written = writes.with_items(np.where(allocated < 0, slots.of[made], allocated))
        read = reads.with_items(slots.of[reads.items])
        done = last_read[reads.items] == reads.row_of
        done[inputs_over] = False
        unread = last_read[made] <= pcs
        waits, ends = self._waits(reads, writes, ~new)
        nothing = np.zeros(count, np.int64)
        maker = _Maker(
            self.shared,
            [table.shares[i] for i in ids.tolist()],
            Columns(
                verbs=table.verbs[ids],
                nodes=self.nodes,
                reads=read,
                writes=written,
                adds=written.only(~new),
                allocates=Ragged.sparse(slots.allocates, count),
                frees=read.only(done).followed_by(written.only(unread)),
                waits=waits,
                ends=ends,
                holds=Ragged.sparse({}, count),
                workspace=nothing,
                beside=nothing,
                at_end=nothing,
            ),
            self._early(waits),
            {pc: self._buckets(pc, reads) for pc in self.alone},
            {pc: self._weights(pc, reads) for pc in self.alone},
        )
        about = read.with_items(2 * slots.kinds[read.items] + done).followed_by(
            written.with_items(4 * slots.kinds[written.items] + 2 * new + unread)
        )
        it = self.shared
        temporaries = Temporaries(it.dag, it.sizes, it.optimizer, it.gpu, slots.slots)
        alike = self._alike(about)
        maker.columns = with_temporaries(maker.columns, alike, maker.of, temporaries.of)
        return Plan(
            self.members,
            PlannedInstructions(maker.columns, maker.all),
            tuple(inputs.given),
            inputs.seeds,
            temporaries.slots,
            tuple([self._return(value, rows) for value, rows in returned.items()]),
        )

    def _alike(self, about: Ragged) -> list[Hashable]:
        """Equal for instructions that need the same temporary memory. That of a computation depends
        on what there is to say ``about`` its slots, and that of others on their share, unless they
        are alone."""
        rows = about.only(np.repeat(self.table.computes[self.ids], about.lengths)).tuples()
        keys: list[Hashable] = [*zip(self.ids.tolist(), rows, strict=True)]
        for pc in self.alone:
            keys[pc] = pc
        return keys

    def _values(self, same: Mapping[int, int]) -> tuple[Ragged, Ragged]:
        """The values that each instruction reads and makes. The first value of a sum stands for all
        values that accumulate in the same slot."""
        shared, table, count = self.shared, self.table, len(self.ids)
        nothing = len(self.dag.nodes)
        reads = shared.reads.take(np.where(table.reads[self.ids], self.nodes, nothing))
        writes = shared.writes.take(np.where(table.writes[self.ids], self.nodes, nothing))
        if same:
            values = np.arange(shared.numbered)
            values[list(same)] = list(same.values())
            reads = reads.with_items(values[reads.items])
        rows = {pc: self._read_alone(pc) for pc in self.alone}
        return reads.followed_by(Ragged.sparse(rows, count)), writes

    def _read_alone(self, pc: int) -> list[int]:
        """The values that an update or a reduction of state or scalars reads."""
        shared, node = self.shared, self.dag.nodes[self.nodes[pc]]
        mine = self._mine(node.reads, alike=takes_every_copy(self.dag, node))
        reads = [*dict.fromkeys([shared.sums.get(v, v) for v in mine])]
        if isinstance(node.op, Update):
            self.updates.append(node.op.bucket)
            return reads
        made = shared.sums.get(node.writes[0], node.writes[0])
        return [*reads, shared.buffer(made)] if self.accumulation.reduces(reads, made) else reads

    def _mine(self, values: Iterable[int], *, alike: bool = False) -> list[int]:
        """The ``values`` that this class makes and contributes: only the first of equal copies,
        unless copies are summed ``alike``. A device of a replica group that computes no part of a
        sum joins the reduction without input."""
        kinds, by = self.dag.kinds.of, self.shared.touched.by
        mine = []
        for value in values:
            if (number := self.dag.maker(value)) is None:
                continue
            maker = self.dag.nodes[number]
            if self.me not in by(maker.devices):
                continue
            kind = int(kinds[number])
            if not alike and kind not in self._counts:
                rank = maker.devices.index(self.members[0])
                self._counts[kind] = self.dag.copy_of(maker, rank) == 0
            if alike or self._counts[kind]:
                mine.append(value)
        return mine

    def _returned(self, writes: Ragged) -> dict[int, RowShards]:
        """The outputs that have rows and that this class makes and returns, and the devices that
        shard their rows."""
        values = self.dag.model.values
        wanted = [of for of in self.dag.model.outputs if values[of].shape]
        made = {value for of in wanted for value in self.dag.activations(of)}
        in_order = dict.fromkeys(v for v in (writes.items.tolist() if made else ()) if v in made)
        return {v: self.shared.rows(self.dag.source(v)) for v in self._mine(in_order)}

    def _overwrites(self, reads: Ragged, returned: Iterable[int]) -> Bools:
        """Which instructions overwrite their last input with their result: some all-reduces."""
        times = np.bincount(reads.items, minlength=self.shared.numbered)
        times[list(returned)] += 1
        found = self.table.overwrites[self.ids] & (reads.lengths > 0)
        last = reads.items[reads.starts[1:][found] - 1]
        alone = self.table.alone[self.ids][found]
        # a buffer, or a sum that is not yet over all copies
        found[found] = np.where(alone, last >= self.dag.first_extra, times[last] == 1)
        return found

    def _waits(self, reads: Ragged, writes: Ragged, added: Bools) -> tuple[Ragged, Ragged]:
        """The instructions that each instruction waits for, and those that it completes."""
        table, ids = self.table, self.ids
        in_turn = np.full(len(ids), -1)
        for pc in np.flatnonzero(table.in_turn[ids]).tolist():
            brings = brought_in_turn(self.dag, self.dag.nodes[self.nodes[pc]])
            in_turn[pc] = -1 if brings is None else brings
        after = self.shared.after.take(self.nodes)
        buffers = np.array([*self.slots.buffers.items()], np.int64).reshape(-1, 2)
        later = np.array(self.slots.later, np.int64).reshape(-1, 2)
        pcs = writes.row_of
        return waits_of(
            Issued(
                self.nodes, table.streams[ids], table.communicates[ids], table.limits[ids], in_turn
            ),
            reads=(
                np.concatenate((reads.row_of, pcs[added])),
                np.concatenate((reads.items, writes.items[added])),
            ),
            writes=(
                np.concatenate((pcs, buffers[:, 1])),
                np.concatenate((writes.items, buffers[:, 0])),
            ),
            before=(later[:, 0], later[:, 1]),
            after=(after.row_of, after.items),
        )

    def _early(self, waits: Ragged) -> Ints:
        """The computation before which each receive of a small message may be issued."""
        computes = np.where(self.table.computes[self.ids], np.arange(len(self.ids)), 0)
        last = np.maximum.accumulate(np.concatenate(([0], computes)))[:-1]
        early: Ints = np.where(self.table.early[self.ids] & (waits.lengths == 0), last, -1)
        return early

    def _buckets(self, pc: int, reads: Ragged) -> tuple[int, ...]:
        """The buckets that the optimizer steps here, or whose gradients the norm covers."""
        share = self.table.shares[self.ids[pc]]
        if share.verb is Verb.UPDATE:
            if not self.shared.optimizer.whole:
                return (share.of,)
            return tuple(self.updates) if share.of == self.updates[-1] else ()
        if share.content is not Content.NORM:
            return ()
        values = reads.row(pc)
        updated = any(self.shared.content(value) is Content.SQUARES for value in values)
        return () if updated else tuple(self.updates)

    def _weights(self, pc: int, reads: Ragged) -> tuple[float, ...]:
        """The weights of the losses that an instruction reads. A loss whose rows are sharded over
        fewer devices than others' weighs more, unless losses are sums. Other outputs are
        averaged."""
        content = self.table.shares[self.ids[pc]].content
        if content not in (Content.OUTPUT, Content.LOSS):
            return ()
        values = reads.row(pc)
        if content is Content.LOSS and self.dag.model.count is not None:
            return (1.0,) * (len(values) // 2)
        makers = [self.dag.source(v) for v in values]
        if content is Content.LOSS:
            return tuple(self.shared.largest_loss / maker.parts for maker in makers)
        microbatches = self.dag.microbatches[1] if self.dag.microbatches else 1
        return tuple(1 / (microbatches * maker.parts) for maker in makers)

    def _return(self, value: int, rows: RowShards) -> Returned:
        template, microbatch = self.dag.table.value(value)
        return Returned(int(self.slots.of[value]), template.of, microbatch, rows)
