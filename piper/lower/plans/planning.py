"""Makes the plan of each rank equivalence class from the issue order.

A plan lists the instructions of its class over its own slots: what each instruction waits for,
where gradients accumulate, and which slots are freed after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from piper.base.errors import DirectiveError
from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.sizes import Sizes
from piper.ir.dag.values import PARAMETER_GRADIENTS, Content, Role
from piper.ir.ops import Add, Collective, Compute, Group, Select, Transfer, Update, same_group
from piper.ir.plan.instructions import (
    COMMUNICATING,
    NO_ROWS,
    Given,
    Instruction,
    MemoryKind,
    Returned,
    RowShards,
    Seed,
    Slot,
    Verb,
)
from piper.ir.plan.issue_order import IssueOrder
from piper.ir.plan.plan import Plan
from piper.ir.plan.rank_classes import RankClasses, takes_every_copy
from piper.ir.rules import OptimizerCost
from piper.lower.communication.sorted_rows import brought_in_turn
from piper.lower.plans.accumulation import Accumulation
from piper.lower.plans.plan_context import PlanContext, Touched
from piper.lower.plans.temporaries import Temporaries

_UNDER_WAY = 2
"""Limit on sends, or on reduce-scatters, in progress on a stream: each holds its input until it
ends. The limit is 1 for gradients that are reduce-scattered every microbatch (ZeRO-2 and 3)."""


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
    rows: list[list[int]] = [[] for _ in classes.members]
    touched = Touched(classes)
    for number in order.order:
        takes_part = [c for group in dag.nodes[number].endpoints for c in touched.by(group)]
        for c in dict.fromkeys(takes_part):
            rows[c].append(number)
    shared = PlanContext(dag, sizes, touched, optimizer, gpu)
    return tuple(
        _Planner(shared, members).plan(row)
        for members, row in zip(classes.members, rows, strict=True)
    )


_SMALL = 2**16
"""Bytes up to which a receive may be issued early: a message that arrives during the computation
before is taken at once. Otherwise the sender is asked only when the message is needed, and the
device waits for the answer. A larger message would hold memory that the plan does not count, and
the handshake is a small part of its time."""
_Part = tuple[Verb, str, list[int], list[int]]
"""A class's share of a node: verb, stream, values read, values made."""


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
        self.slots: dict[int, int] = {}
        """By value, or by the number of a buffer (``_buffer``)."""
        self.out: list[Instruction] = []
        self.made_at: dict[int, list[int]] = {}
        self.node_at: dict[int, int] = {}
        self.left: defaultdict[int, int] = defaultdict(int)
        """How many reads of a value remain."""
        self.read_once: set[int] = set()
        self.given: list[Given] = []
        self.seeds: dict[tuple[int, int], Seed] = {}
        self.returned: dict[int, RowShards] = {}
        """Values returned to the caller at the end of the step, and the devices that shard their
        rows."""
        self.shards: dict[tuple[int, int], RowShards] = {}
        self.same: dict[int, int] = {}
        """For a seed equal to that of another microbatch, the latter."""
        self.updates: list[int] = []
        """The updated buckets, in order."""
        self.computed = 0
        """The program counter of the last computation."""
        self.under_way: set[int] = set()
        """Communications that no instruction has waited for yet."""
        self.holding: defaultdict[str, list[int]] = defaultdict(list)
        """By stream, the communications that may still hold their inputs."""

    def plan(self, row: list[int]) -> Plan:
        self._begin(row)
        parts = [(number, part) for number in row for part in self._parts(self.dag.nodes[number])]
        for number, (verb, _, reads, writes) in parts:
            if self.accumulation.add(verb, reads, writes):
                reads.append(_buffer(writes[0]))
            elif verb is Verb.UPDATE:
                self.updates.append(self.shared.about(self.dag.nodes[number])[1])
            for value in reads:
                self.left[value] += 1
        for value in self._outputs(row):
            self.left[value] += 1
            self.returned[value] = self._rows(self.dag.nodes[self.dag.producers[value]])
        self.read_once = {value for value, reads in self.left.items() if reads == 1}
        for number, part in parts:
            self._emit(number, *part)
        returned = tuple(self._return(value, rows) for value, rows in self.returned.items())
        assert not self.slots, "every value is read, or freed where it is made"
        seeds = tuple(self.seeds.values())
        out, given, kinds = tuple(self.out), tuple(self.given), tuple(self.kinds)
        return Plan(self.members, out, given, seeds, kinds, returned)

    def _outputs(self, row: list[int]) -> list[int]:
        """The outputs that have rows and that this class makes and returns."""
        values = self.dag.model.values
        wanted = [of for of in self.dag.model.outputs if values[of].shape]
        made = {value for of in wanted for value in self.dag.activations(of)}
        in_order = (v for number in (row if wanted else ()) for v in self.dag.nodes[number].writes)
        return self._mine(tuple(value for value in in_order if value in made))

    def _return(self, value: int, rows: RowShards) -> Returned:
        template, microbatch = self.dag.table.value(value)
        return Returned(self.slots.pop(value), template.of, microbatch, rows)

    def _parts(self, node: Node) -> Iterable[_Part]:
        """This class's share of a node. The first value of a sum stands for all values that
        accumulate in the same slot."""
        dag = self.dag
        match node.op:
            case Transfer(source=source, target=target):
                if self.me in self.shared.touched.by(source):
                    yield Verb.SEND, f"{node.stream}/send", [*node.reads], []
                if self.me in self.shared.touched.by(target):
                    yield Verb.RECV, f"{node.stream}/recv", [], [*node.writes]
            case Compute():
                reads = [self.same.get(v, v) for v in node.reads]
                yield Verb.COMPUTE, node.stream, reads, self._leaders(node.writes)
            case Collective() if self.shared.about(node)[0] is Content.VALUE:
                yield Verb.COLLECTIVE, node.stream, [*node.reads], [*node.writes]
            case Collective():
                reads = self._leaders(self._mine(node.reads, alike=takes_every_copy(dag, node)))
                yield Verb.COLLECTIVE, node.stream, reads, self._leaders(node.writes)
            case Update():
                reads = self._leaders(self._mine(node.reads, alike=takes_every_copy(dag, node)))
                yield Verb.UPDATE, node.stream, reads, [*node.writes]
            case Add():
                yield Verb.ADD, node.stream, [*node.reads], [*node.writes]
            case Select():
                yield Verb.SELECT, node.stream, [*node.reads], [*node.writes]

    def _begin(self, row: list[int]) -> None:
        """Allocate the slots that are filled before the step begins: batch tensors and seeds."""
        known: dict[int, RowShards] = {}
        for number in row:
            node = self.dag.nodes[number]
            for value in node.reads if isinstance(node.op, Compute) else ():
                role = self.dag.role(value)
                if role is Role.BATCH:
                    rows = self._rows(node)
                    if value not in known:
                        known[value] = rows
                        template, microbatch = self.dag.table.value(value)
                        slot = self._held(value, rows.parts)
                        self.given.append(Given(slot, template.of, microbatch, rows))
                    elif not self._same(known[value], rows):
                        self._refuse_two_parts(value, number, known[value])
                elif role is Role.SEED:
                    self._seed(value, node.parts)

    def _seed(self, value: int, size: int) -> None:
        of = self.dag.table.value(value)[0].of
        first = self.seeds.get((of, size))
        if first is not None:
            self.same[value] = next(v for v, s in self.slots.items() if s == first.slot)
            return
        microbatches = self.dag.microbatches[1] if self.dag.microbatches else 1
        parts = 1 if self.dag.model.count is not None else microbatches * size
        self.seeds[of, size] = Seed(self._held(value, size), of, size, parts)

    def _same(self, one: RowShards, other: RowShards) -> bool:
        """Whether every device of the class has the same rows of both."""
        if same_group(one.devices, other.devices) and one.copies == other.copies:
            return True
        return all(one.sharing(device) == other.sharing(device) for device in self.members)

    def _held(self, value: int, parts: int) -> int:
        nbytes = self.shared.sizes.given(value, parts)
        return self._new(value, self.shared.held(MemoryKind.BATCH, nbytes))

    def _refuse_two_parts(self, value: int, number: int, rows: RowShards) -> None:
        name = self.dag.model.values[self.dag.table.value(value)[0].of].name
        node, mine = self.dag.nodes[number], self.members[0]
        others = list(rows.sharing(mine))
        raise DirectiveError(
            f"{self.shared.name(number)} reads {name} on {list(node.devices)}, but another region "
            f"on device {mine} reads it as one of {others}: a device can take one "
            f"part of a microbatch only; place both on the same devices "
            f"({self.dag.history[node.sends.made_by]})"
        )

    def _leaders(self, values: Iterable[int]) -> list[int]:
        return [*dict.fromkeys([self.sums.get(v, v) for v in values])]

    def _mine(self, values: tuple[int, ...], *, alike: bool = False) -> list[int]:
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

    def _rows(self, node: Node) -> RowShards:
        """The devices that shard the rows of a node's computation. Equal ones are one object."""
        key = id(node.devices), node.replicas  # the DAG holds the devices
        if key not in self.shards:
            self.shards[key] = RowShards(node.devices, node.replicas)
        return self.shards[key]

    def _new(self, value: int, kind: Slot) -> int:
        slot = self.slots[value] = len(self.kinds)
        self.kinds.append(kind)
        return slot

    def _emit(
        self, number: int, verb: Verb, stream: str, reads: list[int], writes: list[int]
    ) -> None:
        node = self.dag.nodes[number]
        made_at, slots, here = self.made_at, self.slots, len(self.out)
        added = [v for v in writes if v in made_at]
        before: list[int] = []
        brought: list[int] = []
        computes = verb is Verb.COMPUTE
        in_turn = None if computes else brought_in_turn(self.dag, node)
        for value in (*reads, *added):
            if made := made_at.get(value):
                before += made
                last = self.out[made[-1]]
                if last.verb in COMMUNICATING and last.node != in_turn:
                    brought.append(made[-1])
        if node.after:
            before += [self.node_at[b] for b in node.after if b in self.node_at]
        content, of = (None, 0) if computes else self.shared.about(node)
        read = tuple([slots[v] for v in reads])
        allocates: list[int] = []
        for value in writes:
            if value not in slots:
                self._write(verb, node, value, reads, before, allocates)
        written = tuple([slots[v] for v in writes])
        adds = tuple([slots[v] for v in added])
        waits = self._waits(before, brought, verb, node, stream)
        self.node_at[number] = here
        for value in writes:
            made_at.setdefault(value, []).append(here)
        self.out.append(
            self.temporaries.of(
                Instruction(
                    verb=verb,
                    node=number,
                    name=self.shared.name(number),
                    stream=stream,
                    op=node.op,
                    content=content,
                    of=of,
                    rows=self._rows(node) if computes else NO_ROWS,
                    reads=read,
                    writes=written,
                    adds=adds,
                    allocates=tuple(allocates),
                    frees=self._frees(reads, writes),
                    waits=waits,
                    ends=tuple([w for w in waits if w in self.under_way]),
                    buckets=() if computes else self._buckets(verb, content, of, reads),
                    axes=self.shared.axes(node.op.chunk) if isinstance(node.op, Compute) else (),
                    weights=() if computes else self._weights(content, reads),
                    early=None if waits or computes else self._early(verb, node, written),
                )
            )
        )
        if computes:
            self.computed = here
        self.under_way.difference_update(waits)
        if verb in COMMUNICATING:
            self.under_way.add(here)

    def _write(
        self,
        verb: Verb,
        node: Node,
        value: int,
        reads: list[int],
        before: list[int],
        allocates: list[int],
    ) -> None:
        """Allocate a slot for ``value``, or reuse an input's slot for a change in place. For the
        first gradients of a sum, also allocate the memory in which they accumulate."""
        summed = self.accumulation
        if verb is Verb.COLLECTIVE and self._in_place(node, reads):
            self.slots[value] = self.slots.pop(reads[-1])
        elif self.dag.role(value) not in PARAMETER_GRADIENTS:
            self._new(value, self.shared.slot(verb, node, value))
        else:
            for made in summed.buffers(value):
                buffer = _buffer(made)
                if buffer in self.slots:  # made earlier, or for another value of this instruction
                    before += [pc for pc in self.made_at[buffer] if pc < len(self.out)]
                else:
                    allocates.append(self._new(buffer, summed.buffer(made)))
                    self.made_at[buffer] = [len(self.out)]
            lies_in = tuple(self.slots[_buffer(made)] for made in summed.buffers(value))
            alone = summed.repeated(value) and self.left[value] > 0 and not lies_in
            slot = self._new(value, summed.slot(value, lies_in, alone=alone))
            if alone:
                allocates.append(slot)

    def _in_place(self, node: Node, reads: list[int]) -> bool:
        """Whether a node overwrites its last input with its result."""
        if not isinstance(node.op, Collective) or node.op.kind is not Move.ALL_REDUCE or not reads:
            return False
        content, _ = self.shared.about(node)
        if content is Content.VALUE:
            return reads[0] in self.read_once and self.shared.private(reads[0])
        # a buffer, or a sum that is not yet over all copies
        return content is Content.GRADIENTS and not 0 <= reads[-1] < self.dag.first_extra

    def _buckets(
        self, verb: Verb, content: Content | None, of: int, reads: list[int]
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

    def _weights(self, content: Content | None, reads: list[int]) -> tuple[float, ...]:
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

    def _early(self, verb: Verb, node: Node, written: tuple[int, ...]) -> int | None:
        """The computation before which a small message may be received. A device must send to
        itself before it receives."""
        op = node.op
        if verb is not Verb.RECV or not isinstance(op, Transfer):
            return None
        small = sum(self.kinds[slot].nbytes for slot in written) <= _SMALL
        return self.computed if small and set(op.source).isdisjoint(op.target) else None

    def _frees(self, reads: list[int], writes: list[int]) -> tuple[int, ...]:
        """The slots of values without remaining reads."""
        freed = []
        for value in reads:
            self.left[value] -= 1
            if self.left[value] == 0:
                self.made_at.pop(value, None)
                if value in self.slots:  # otherwise it was overwritten in place
                    freed.append(self.slots.pop(value))
        for value in writes:
            if self.left[value] == 0:
                del self.made_at[value]
                freed.append(self.slots.pop(value))
        return tuple(freed)

    def _waits(
        self, before: list[int], brought: list[int], verb: Verb, node: Node, stream: str
    ) -> tuple[int, ...]:
        """The last instruction of each other stream to wait for, and the communications that
        deliver the inputs."""
        last: dict[str, int] = {}
        for pc in before:
            name = self.out[pc].stream
            if name != stream and last.get(name, -1) < pc:
                last[name] = pc
        waits = {*last.values(), *brought}
        limit = _UNDER_WAY if verb is Verb.SEND else 0
        if verb is Verb.COLLECTIVE:
            limit = self._scatters(node)
        if limit:
            row = self.holding[stream]
            row.append(len(self.out))
            waits.update(row[:-limit])
            del row[:-limit]
        return tuple(sorted(waits))

    def _scatters(self, node: Node) -> int:
        """Limit on reduce-scatters like this one in progress; 0 if the node is none."""
        if not isinstance(node.op, Collective) or node.op.kind is not Move.REDUCE_SCATTER:
            return 0
        content, of = self.shared.about(node)
        if content is not Content.GRADIENTS:
            return 0
        bucket = self.dag.buckets[of]
        return 1 if bucket.level > 1 else _UNDER_WAY
