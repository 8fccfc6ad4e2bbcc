"""One plan for each class of devices: small frozen instructions over numbered slots.

A plan is all a worker needs besides the programs and its state: what to run in which order on
which stream, what to wait for, which slots are read, written, added to and freed. It serializes
without pickle and prints one instruction a line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from piper.ir.dag import Collective, Compute, Dag, Group, Node, Transfer, Update
from piper.ir.text import name_of
from piper.ir.values import GIVEN, ExtraRole, Role
from piper.lower.classes import Classes
from piper.lower.schedule import Schedule
from piper.lower.sizes import Sizes


class Verb(Enum):
    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    COLLECTIVE = "collective"
    UPDATE = "update"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing that a device does. ``waits`` are places of instructions on other streams that
    must be done before; order within a stream is implied."""

    verb: Verb
    node: int
    name: str
    stream: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()
    """Those of ``writes`` that hold something already, to which the result is added."""
    waits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What the devices of one class do in one step."""

    devices: Group
    instructions: tuple[Instruction, ...]
    given: tuple[int, ...]
    """The slots that hold the batch when the step begins."""
    slot_bytes: tuple[int, ...]

    def __str__(self) -> str:
        head = f"plan of devices {','.join(map(str, self.devices))}"
        return "\n".join([head, *(f"{i:>4} {_line(x)}" for i, x in enumerate(self.instructions))])

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        for instruction in data["instructions"]:
            instruction["verb"] = instruction["verb"].value
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        lists = ("reads", "writes", "adds", "waits")
        instructions = tuple(
            Instruction(
                verb=Verb(item["verb"]),
                node=item["node"],
                name=item["name"],
                stream=item["stream"],
                **{key: tuple(item[key]) for key in lists},
            )
            for item in data["instructions"]
        )
        return Plan(
            tuple(data["devices"]), instructions, tuple(data["given"]), tuple(data["slot_bytes"])
        )


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
    sums = _sums(dag)
    return tuple(
        _Planner(dag, members, sums, sizes, touched).plan(row)
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
        if id(group) not in self._known:
            self._known[id(group)] = self.classes.touched(group)
            self._kept.append(group)
        return self._known[id(group)]


def _sums(dag: Dag) -> dict[int, int]:
    """For each value that is added to others in one slot, the first of them.

    Gradients of one chunk, and reductions of one bucket, add up over microbatches, unless someone
    reads those of a single microbatch.
    """
    together: dict[object, list[int]] = {}
    apart: set[object] = set()
    for node in dag.nodes:
        if not isinstance(node.op, Update) and not _is_bucket_reduction(dag, node):
            continue
        read: defaultdict[object, list[int]] = defaultdict(list)
        for value in node.reads:
            read[_kind(dag, value)].append(value)
        for kind, values in read.items():
            if together.setdefault(kind, values) != values:
                apart.add(kind)
    return {
        value: values[0]
        for kind, values in together.items()
        if kind not in apart
        for value in values
    }


def _is_bucket_reduction(dag: Dag, node: Node) -> bool:
    extra = [dag.extra[v - dag.first_extra] for v in node.writes if v >= dag.first_extra]
    return bool(extra) and extra[0].role is ExtraRole.REDUCED


def _kind(dag: Dag, value: int) -> object:
    """Values of equal kind add up: gradients of one chunk, reductions of one bucket."""
    if value >= dag.first_extra:
        return dag.extra[value - dag.first_extra]
    return dag.table.value(value)[0]


class _Planner:
    """Gives slots to values as they come and go on one class of devices."""

    def __init__(
        self, dag: Dag, members: Group, sums: dict[int, int], sizes: Sizes, touched: _Touched
    ) -> None:
        self.dag = dag
        self.members = members
        self.sums = sums
        self.sizes = sizes
        self.me = touched.classes.of[members[0]]
        self.touched = touched
        self.first_extra = dag.first_extra
        self.slots: dict[int, int] = {}
        self.slot_bytes: list[int] = []
        self.out: list[Instruction] = []
        self.made_at: dict[int, list[int]] = defaultdict(list)
        self.read_at: dict[int, list[int]] = defaultdict(list)
        self.node_at: dict[int, int] = {}

    def plan(self, row: list[int]) -> Plan:
        left = self._readers(row)
        given = [self._slot(v) for v in left if self._is_given(v) and self._role(v) is Role.BATCH]
        for number in row:
            node = self.dag.nodes[number]
            for verb, stream, reads, writes in self._parts(node):
                self._emit(verb, number, stream, reads, writes)
                self._free(reads, writes, left)
        for value in [v for v in self.slots if v in self.made_at]:
            self._release(value)  # results that nobody reads: the loss
        return Plan(self.members, tuple(self.out), tuple(given), tuple(self.slot_bytes))

    def _parts(self, node: Node) -> Iterable[tuple[Verb, str, tuple[int, ...], tuple[int, ...]]]:
        match node.op:
            case Transfer(source=source, target=target):
                if self.me in self.touched.by(source):
                    yield Verb.SEND, f"{node.stream}/send", node.reads, ()
                if self.me in self.touched.by(target):
                    yield Verb.RECV, f"{node.stream}/recv", (), node.writes
            case Compute():
                yield Verb.COMPUTE, node.stream, node.reads, node.writes
            case Collective():
                yield Verb.COLLECTIVE, node.stream, self._mine(node.reads), node.writes
            case Update():
                yield Verb.UPDATE, node.stream, self._mine(node.reads), node.writes

    def _mine(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Those of ``values`` that this class makes: a holder that computes none of a sum's parts
        takes part in the sum with nothing."""
        nodes, producers = self.dag.nodes, self.dag.producers
        return tuple(
            v
            for v in values
            if v in producers and self.me in self.touched.by(nodes[producers[v]].devices)
        )

    def _readers(self, row: list[int]) -> dict[int, int]:
        """How many instructions of this class read each value, sums counted as one."""
        left: defaultdict[int, int] = defaultdict(int)
        for number in row:
            for _, _, reads, _ in self._parts(self.dag.nodes[number]):
                for value in dict.fromkeys(self._leader(v) for v in reads):
                    left[value] += 1
        return left

    def _leader(self, value: int) -> int:
        return self.sums.get(value, value)

    def _role(self, value: int) -> Role | None:
        if value >= self.first_extra:
            return None
        return self.dag.table.value(value)[0].role

    def _is_given(self, value: int) -> bool:
        return self._role(value) in GIVEN

    def _slot(self, value: int) -> int:
        if value not in self.slots:
            self.slots[value] = len(self.slot_bytes)
            self.slot_bytes.append(self.sizes.nbytes(value))
        return self.slots[value]

    def _emit(
        self,
        verb: Verb,
        number: int,
        stream: str,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
    ) -> None:
        node = self.dag.nodes[number]
        taken = [
            v for v in dict.fromkeys(map(self._leader, reads)) if self._role(v) is not Role.SEED
        ]
        made = list(dict.fromkeys(map(self._leader, writes)))
        added = [v for v in made if v in self.made_at]
        before: set[int] = set()
        for value in (*taken, *added):
            before.update(self.made_at[value])
        before.update(self.node_at[b] for b in node.after if b in self.node_at)
        waits = self._latest(before, stream)
        here = len(self.out)
        self.out.append(
            Instruction(
                verb=verb,
                node=number,
                name=name_of(self.dag, number),
                stream=stream,
                reads=tuple(self._slot(v) for v in taken),
                writes=tuple(self._slot(v) for v in made),
                adds=tuple(self._slot(v) for v in added),
                waits=waits,
            )
        )
        self.node_at[number] = here
        for value in made:
            self.made_at[value].append(here)
        for value in taken:
            self.read_at[value].append(here)

    def _latest(self, before: set[int], stream: str | None) -> tuple[int, ...]:
        """Of each stream but ``stream``, the last instruction to wait for."""
        last: dict[str, int] = {}
        for place in before:
            name = self.out[place].stream
            if name != stream:
                last[name] = max(last.get(name, -1), place)
        return tuple(sorted(last.values()))

    def _free(self, reads: tuple[int, ...], writes: tuple[int, ...], left: dict[int, int]) -> None:
        for value in dict.fromkeys(map(self._leader, reads)):
            left[value] -= 1
            if left[value] == 0 and self._role(value) is not Role.SEED:
                self._release(value)
        for value in dict.fromkeys(map(self._leader, writes)):
            if left.get(value, 0) == 0 and not self._is_result(value):
                self._release(value)

    def _is_result(self, value: int) -> bool:
        return self._role(value) is Role.ACTIVATION and (
            self.dag.table.value(value)[0].of == self.dag.model.loss
        )

    def _release(self, value: int) -> None:
        slot = self.slots.pop(value)
        waits = self._latest({*self.made_at.pop(value, []), *self.read_at.pop(value, [])}, None)
        self.out.append(Instruction(Verb.FREE, -1, "free", "", reads=(slot,), waits=waits))


def _line(x: Instruction) -> str:
    if x.verb is Verb.FREE:
        return f"free s{x.reads[0]}"
    reads = " ".join(f"s{s}" for s in x.reads)
    writes = " ".join(f"+s{s}" if s in x.adds else f"s{s}" for s in x.writes)
    waits = f" waits {' '.join(map(str, x.waits))}" if x.waits else ""
    return f"[{x.stream}] {x.verb.value} {x.name}: {reads} -> {writes}{waits}"
