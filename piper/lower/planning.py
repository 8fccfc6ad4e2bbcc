"""Makes the plans: for each class of devices its part of the order, over slots of its own, with
what each instruction waits for and what is freed after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from piper.errors import DirectiveError
from piper.ir.dag import (
    Add,
    Collective,
    CollectiveKind,
    Compute,
    Dag,
    Group,
    Node,
    Transfer,
    Update,
    same_group,
)
from piper.ir.text import name_of
from piper.ir.values import ExtraRole, Role
from piper.lower.classes import Classes
from piper.lower.plan import Given, Instruction, Plan, Verb
from piper.lower.schedule import Schedule
from piper.lower.sizes import Sizes

_UNDER_WAY = 2
"""How many messages of a stream, or reductions that scatter, may be under way at a time: each holds
what it sends until it is over. Of gradients that are scattered microbatch by microbatch, one."""


def plans_of(dag: Dag, classes: Classes, order: Schedule, sizes: Sizes) -> tuple[Plan, ...]:
    """The plan of each class of devices."""
    rows: list[list[int]] = [[] for _ in classes.members]
    touched = _Touched(classes)
    for number in order.order:
        node = dag.nodes[number]
        if isinstance(node.op, Transfer):
            ends = (*touched.by(node.op.source), *touched.by(node.op.target))
            for c in dict.fromkeys(ends):
                rows[c].append(number)
        else:
            for c in touched.by(node.devices):
                rows[c].append(number)
    shared = _Shared(dag, sizes, touched)
    return tuple(
        _Planner(shared, members).plan(row)
        for members, row in zip(classes.members, rows, strict=True)
    )


class _Touched:
    """The classes of a group, looked up by the group's identity: groups are shared objects, and
    comparing a thousand devices each time would be most of the work."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self._known: dict[int, tuple[int, ...]] = {}
        self._kept: list[Group] = []

    def by(self, group: Group) -> tuple[int, ...]:
        found = self._known.get(id(group))
        if found is None:
            found = self._known[id(group)] = self.classes.touched(group)
            self._kept.append(group)
        return found


class _Shared:
    """What the plans of all classes have in common."""

    def __init__(self, dag: Dag, sizes: Sizes, touched: _Touched) -> None:
        self.dag = dag
        self.sizes = sizes
        self.touched = touched
        self.sums = _sums(dag)
        self._names: dict[int, str] = {}
        self._roles = [value.role for value in dag.table.values]
        self._first_extra = dag.first_extra

    def name(self, number: int) -> str:
        found = self._names.get(number)
        if found is None:
            found = self._names[number] = name_of(self.dag, number)
        return found

    def role(self, value: int) -> Role | None:
        return None if value >= self._first_extra else self._roles[value % len(self._roles)]

    def about(self, node: Node) -> tuple[ExtraRole | None, int]:
        """The role of what a communication makes, and the value or bucket it is about."""
        if isinstance(node.op, Compute | Update | Add):
            return None, 0
        (written,) = node.writes
        if written >= self._first_extra:
            extra = self.dag.extra[written - self._first_extra]
            if extra.role in (ExtraRole.RECEIVED, ExtraRole.EXCHANGED):
                return extra.role, self._plain(extra.of)
            return extra.role, extra.of
        return ExtraRole.PARTIAL, self._plain(written)

    def _plain(self, value: int) -> int:
        return self.dag.table.value(self.dag.plain(value))[0].of


def _sums(dag: Dag) -> dict[int, int]:
    """For each value that is added to others in one slot, the first of them.

    Gradients of one chunk, and reductions of one bucket, add up over microbatches, unless someone
    reads those of a single microbatch.
    """
    together: dict[object, list[int]] = {}
    apart: set[object] = set()
    for node in dag.nodes:
        if isinstance(node.op, Compute | Transfer):
            continue  # a gradient that a pass reads goes into its own and is in no list here
        read: defaultdict[object, list[int]] = defaultdict(list)
        for value in node.reads:
            kind = _kind(dag, value)
            if kind is not None:
                read[kind].append(value)
        for kind, values in read.items():
            if together.setdefault(kind, values) != values:
                apart.add(kind)
    return {
        value: values[0]
        for kind, values in together.items()
        if kind not in apart
        for value in values
    }


def _kind(dag: Dag, value: int) -> object | None:
    """Values of equal kind add up: gradients of one chunk, reductions of one bucket."""
    if value >= dag.first_extra:
        extra = dag.extra[value - dag.first_extra]
        return (extra.role, extra.of) if extra.role is ExtraRole.REDUCED else None
    found = dag.table.value(value)[0]
    gradients = (Role.PARAMETER_GRADIENT, Role.TIED_GRADIENT)
    return found if found.role in gradients else None


class _Planner:
    """Gives slots to values as they come and go on one class of devices."""

    def __init__(self, shared: _Shared, members: Group) -> None:
        self.shared = shared
        self.dag = shared.dag
        self.members = members
        self.me = shared.touched.classes.of[members[0]]
        self.sums = shared.sums
        self.slots: dict[int, int] = {}
        self.slot_bytes: list[int] = []
        self.out: list[Instruction] = []
        self.made_at: dict[int, list[int]] = {}
        self.read_at: dict[int, list[int]] = {}
        self.node_at: dict[int, int] = {}
        self.holding: defaultdict[str, list[int]] = defaultdict(list)
        """By stream, the communications that may still hold what they send."""

    def plan(self, row: list[int]) -> Plan:
        parts = [(number, part) for number in row for part in self._parts(self.dag.nodes[number])]
        left: defaultdict[int, int] = defaultdict(int)
        for _, (_, _, reads, _) in parts:
            for value in reads:
                left[value] += 1
        given = [
            Given(self._given(value, group), self.dag.table.value(value)[0].of, microbatch, group)
            for value, (microbatch, group) in self._batch(row).items()
        ]
        for number, (verb, stream, reads, writes) in parts:
            self._emit(verb, number, stream, reads, writes)
            self._free(reads, writes, left)
        assert not self.slots, "every value is read, or freed where it is made"
        return Plan(self.members, tuple(self.out), tuple(given), tuple(self.slot_bytes))

    def _parts(self, node: Node) -> Iterable[tuple[Verb, str, Sequence[int], Sequence[int]]]:
        """What this class does of a node: the verb, the stream, what it reads and makes, where
        values that are summed in one slot go by the first of them."""
        match node.op:
            case Transfer(source=source, target=target):
                if self.me in self.shared.touched.by(source):
                    yield Verb.SEND, f"{node.stream}/send", node.reads, ()
                if self.me in self.shared.touched.by(target):
                    yield Verb.RECV, f"{node.stream}/recv", (), node.writes
            case Compute():
                reads = [v for v in node.reads if self.shared.role(v) is not Role.SEED]
                yield Verb.COMPUTE, node.stream, reads, self._leaders(node.writes)
            case Collective(kind=CollectiveKind.ALL_TO_ALL):
                yield Verb.COLLECTIVE, node.stream, node.reads, node.writes
            case Collective():
                yield (
                    Verb.COLLECTIVE,
                    node.stream,
                    self._leaders(self._mine(node.reads)),
                    self._leaders(node.writes),
                )
            case Update():
                yield Verb.UPDATE, node.stream, self._leaders(self._mine(node.reads)), node.writes
            case Add():
                yield Verb.ADD, node.stream, node.reads, node.writes

    def _batch(self, row: list[int]) -> dict[int, tuple[int, Group]]:
        """The tensors of the batch that are read here: their microbatch, and among whom their rows
        are divided."""
        found: dict[int, tuple[int, Group]] = {}
        for number in row:
            node = self.dag.nodes[number]
            for value in node.reads if isinstance(node.op, Compute) else ():
                if self.shared.role(value) is Role.BATCH:
                    microbatch = self.dag.table.value(value)[1]
                    rows = self._rows(node)
                    _, group = found.setdefault(value, (microbatch, rows))
                    if not same_group(group, rows):
                        self._refuse_two_parts(value, number, group)
        return found

    def _refuse_two_parts(self, value: int, number: int, group: Group) -> None:
        name = self.dag.model.values[self.dag.table.value(value)[0].of].name
        node = self.dag.nodes[number]
        raise DirectiveError(
            f"{self.shared.name(number)} reads {name} on {list(node.devices)}, but another region "
            f"on device {self.members[0]} reads it as one of {list(group)}: a device can take one "
            f"part of a microbatch only; place both on the same devices "
            f"({self.dag.history[node.sends.made_by]})"
        )

    def _leaders(self, values: Iterable[int]) -> list[int]:
        return list(dict.fromkeys(self.sums.get(v, v) for v in values))

    def _mine(self, values: tuple[int, ...]) -> list[int]:
        """Those of ``values`` that this class makes, of replicas the first: a holder that computes
        none of a sum's parts takes part in the sum with nothing."""
        nodes, producers, by = self.dag.nodes, self.dag.producers, self.shared.touched.by
        made = ((value, nodes[producers[value]]) for value in values if value in producers)
        return [
            value
            for value, maker in made
            if self.me in by(maker.devices)
            and (maker.replicas == 1 or self.members[0] in maker.replica(0))
        ]

    def _rows(self, node: Node) -> Group:
        """The devices, those of this class among them, that divide the rows of what a node
        computes."""
        if node.replicas == 1:
            return node.devices
        return node.replica(node.devices.index(self.members[0]))

    def _slot(self, value: int) -> int:
        slot = self.slots.get(value)
        if slot is None:
            slot = self.slots[value] = len(self.slot_bytes)
            self.slot_bytes.append(self.shared.sizes.nbytes(value))
        return slot

    def _given(self, value: int, group: Group) -> int:
        slot = self.slots[value] = len(self.slot_bytes)
        self.slot_bytes.append(self.shared.sizes.given(value, len(group)))
        return slot

    def _emit(
        self,
        verb: Verb,
        number: int,
        stream: str,
        reads: Sequence[int],
        writes: Sequence[int],
    ) -> None:
        node = self.dag.nodes[number]
        made_at = self.made_at
        added = [v for v in writes if v in made_at]
        before: list[int] = []
        for value in reads:
            before += made_at.get(value, ())
        for value in added:
            before += made_at[value]
        before += [self.node_at[b] for b in node.after if b in self.node_at]
        here = len(self.out)
        role, of = self.shared.about(node)
        self.out.append(
            Instruction(
                verb=verb,
                node=number,
                name=self.shared.name(number),
                stream=stream,
                op=node.op,
                role=role,
                of=of,
                group=self._rows(node) if verb is Verb.COMPUTE else (),
                reads=tuple([self._slot(v) for v in reads]),
                writes=tuple([self._slot(v) for v in writes]),
                adds=tuple([self._slot(v) for v in added]),
                waits=self._waits(before, verb, node, stream),
            )
        )
        self.node_at[number] = here
        for value in writes:
            made_at.setdefault(value, []).append(here)
        for value in reads:
            self.read_at.setdefault(value, []).append(here)

    def _waits(self, before: list[int], verb: Verb, node: Node, stream: str) -> tuple[int, ...]:
        waits = self._latest(before, stream) if before else ()
        limit = _UNDER_WAY if verb is Verb.SEND else self._scatters(node)
        if limit:
            row = self.holding[stream]
            row.append(len(self.out))
            waits = tuple(sorted({*waits, *row[:-limit]}))
            del row[:-limit]
        return waits

    def _scatters(self, node: Node) -> int:
        """How many scatters like this one may be under way; 0 if it is none."""
        if not isinstance(node.op, Collective) or node.op.kind is not CollectiveKind.REDUCE_SCATTER:
            return 0
        bucket = self.dag.buckets[self.shared.about(node)[1]]
        return 1 if bucket.level > 1 else _UNDER_WAY

    def _latest(self, before: Iterable[int], stream: str | None) -> tuple[int, ...]:
        """Of each stream but ``stream``, the last instruction to wait for."""
        last: dict[str, int] = {}
        for place in before:
            name = self.out[place].stream
            if name != stream and last.get(name, -1) < place:
                last[name] = place
        return tuple(sorted(last.values()))

    def _free(
        self, reads: Sequence[int], writes: Sequence[int], left: defaultdict[int, int]
    ) -> None:
        for value in reads:
            left[value] -= 1
            if left[value] == 0:
                self._release(value)
        for value in writes:
            if left[value] == 0:
                self._release(value)

    def _release(self, value: int) -> None:
        slot = self.slots.pop(value)
        uses = [*self.made_at.pop(value, ()), *self.read_at.pop(value, ())]
        waits = self._latest(uses, None)
        self.out.append(Instruction(Verb.FREE, -1, "free", "", reads=(slot,), waits=waits))
