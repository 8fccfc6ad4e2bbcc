"""An independent checker of plans: it executes them symbolically and reports what would go wrong.

Takes a lowered DAG and its plans; raises a ``PlanError`` that names the faulty instruction. Shares
no code with ``piper.lower``: it reads the plans, the model's facts, and those parts of the lowered
DAG that a worker needs too (what each node is, its participants, buckets and rules). It assumes
only what a worker guarantees: a stream runs in order, an instruction starts when its ``waits`` are
done, a communication ends when all its participants have reached it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.facts import Model
from piper.ir.dag.values import Content, Role, Value
from piper.ir.ops import Add, Collective, Compute, Copy, Group, Transfer, Update
from piper.ir.passes import Kind, Pass, Ref
from piper.ir.plan.instructions import Instruction, MemoryKind, Slot, Verb
from piper.ir.plan.memory import Memory
from piper.ir.plan.plan import Plan
from piper.ir.rules import Bucket

Clock = dict[str, int]
"""For each stream, the last pc known to be done; all earlier ones of that stream are done too."""
At = tuple[int, int]
"""A rank equivalence class and a program counter."""

COMMUNICATING = (Verb.SEND, Verb.RECV, Verb.COLLECTIVE)
BESIDE = (*COMMUNICATING, Verb.COPY)
HALVES = (Pass.BI, Pass.BW)
OF_PARAMETERS = (Role.PARAMETER_GRADIENT, Role.TIED_GRADIENT)
OF_BACKWARD = (Role.SAVED, Role.SAVED_FOR_BW, Role.BI_SAVED)
SCALAR = 8
"""Bytes of a sum over all devices, or of one bucket's squared norm."""


class PlanError(AssertionError):
    """A plan that must not be run."""


def check(
    dag: Dag,
    plans: Sequence[Plan],
    memory: Sequence[Memory] = (),
    *,
    clip: bool = False,
    models: Mapping[int, Model] | None = None,
    optimizer_bytes: float = 2.0,
    whole: bool = False,
) -> None:
    """Raise a ``PlanError`` unless the plans together do one step of ``dag`` correctly.

    ``clip``, ``models``, ``optimizer_bytes`` and ``whole`` are the arguments that lowering was
    given.
    """
    checker = _Checker(dag, plans, clip, models or {}, whole)
    checker.check_shape()
    checker.check_passes()
    checker.check_buckets()
    checker.check_meetings()
    order = checker.run()
    checker.check_slots(order)
    checker.check_contents(order)
    checker.check_returned()
    for c in range(len(plans)):
        checker.check_frees(c)
    checker.check_order()
    checker.check_buffers()
    checker.check_state()
    checker.check_copies()
    checker.check_under_way()
    for c, found in zip(range(len(plans)), memory, strict=bool(memory)):
        checker.check_memory(c, found, optimizer_bytes)


def implied_waits(plan: Plan) -> set[tuple[int, int]]:
    """The waits (pc, waited for) of a valid plan that its other waits and stream orders imply."""
    clocks = _Clocks(plan)
    found = set()
    for pc, x in enumerate(plan.instructions):
        for w in x.waits:
            others = tuple(o for o in x.waits if o != w)
            if clocks.before(pc, others).get(plan.instructions[w].stream, -1) >= w:
                found.add((pc, w))
        clocks.finish(pc)
    return found


class _Clocks:
    """The instructions known to be done before each instruction of one plan starts."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ends: dict[int, Clock] = {}
        self.starts: dict[int, Clock] = {}
        self.previous: dict[int, int] = {}
        last: dict[str, int] = {}
        for pc, x in enumerate(plan.instructions):
            if x.stream in last:
                self.previous[pc] = last[x.stream]
            last[x.stream] = pc

    def before(self, pc: int, waits: Iterable[int]) -> Clock:
        clock: Clock = {}
        sources = [*waits]
        if pc in self.previous:
            sources.append(self.previous[pc])
        for source in sources:
            for stream, done in self.ends[source].items():
                if clock.get(stream, -1) < done:
                    clock[stream] = done
        return clock

    def finish(self, pc: int) -> None:
        x = self.plan.instructions[pc]
        self.starts[pc] = self.before(pc, x.waits)
        self.ends[pc] = {**self.starts[pc], x.stream: pc}

    def sure(self, before: int, pc: int) -> bool:
        """Whether ``before`` is always done when ``pc`` starts."""
        x = self.plan.instructions[before]
        return self.starts[pc].get(x.stream, -1) >= before


@dataclass(frozen=True)
class _Batch:
    """A tensor of the batch: its value number, microbatch, and for each device of the class the
    group that shares its rows."""

    value: int
    microbatch: int
    groups: tuple[Group, ...]


def _sharing(plan: Plan, devices: Group, copies: int) -> tuple[Group, ...]:
    """For each device of a plan, those of ``devices`` that have all rows once together with it."""
    if not set(plan.devices) <= set(devices):
        raise PlanError(f"rows of {devices} are not those of {plan.devices}")
    return tuple(devices[devices.index(d) % copies :: copies] for d in plan.devices)


@dataclass(frozen=True)
class _Seed:
    """The loss gradient of a microbatch that is split over ``group`` devices."""

    group: int


@dataclass(frozen=True)
class _Buffer:
    """A buffer that accumulates gradients, of a bucket or, if ``bucket`` is None, of one chunk."""

    bucket: int | None


@dataclass(frozen=True)
class _Tensor:
    """A value of the model: its group, and its form there."""

    value: int
    group: Group
    form: str = "plain"
    replicas: int = 1
    """How many adjacent devices of the group have the same rows."""
    added: tuple[int, ...] = ()
    """The terms that were added to a gradient, in order."""

    @property
    def parts(self) -> int:
        return len(self.group) // self.replicas


@dataclass
class _Gradients:
    """A sum of gradients. For each device: how often it contains each (gradient, source device)."""

    parts: dict[int, Counter[tuple[int, int]]]
    nbytes: int
    names: tuple[str, ...] = ()
    """The parameters they belong to, while they are local to a device."""
    bucket: int | None = None
    """The bucket they are reduced for; None while they are local to a device."""
    scattered: bool = False

    def plus(self, other: _Gradients) -> _Gradients:
        parts = {d: self.parts[d] + other.parts[d] for d in self.parts}
        return _Gradients(parts, self.nbytes, self.names, self.bucket, self.scattered)

    def like(self, other: _Gradients) -> bool:
        """Whether the two may be added."""
        mine = (self.nbytes, self.names, self.bucket, self.scattered, set(self.parts))
        theirs = (other.nbytes, other.names, other.bucket, other.scattered, set(other.parts))
        return mine == theirs


@dataclass(frozen=True)
class _OfBucket:
    kind: Content
    bucket: int
    scattered: bool = False


@dataclass(frozen=True)
class _OfAll:
    """A sum over all devices: LOSS, NORM, LOAD or OUTPUT. Its terms are checked when it is made."""

    kind: Content
    of: int = 0
    """The chunk whose experts' LOAD it is, or the value of the OUTPUT."""


@dataclass(frozen=True)
class _Rows:
    """Rows sorted by expert."""

    counts: int
    """The value that holds the number of rows of each expert."""
    own: int
    """How many rows a device has."""
    room: int
    """How many rows a device has room for."""
    sorted_in: int
    """The number of parts in which they were sorted."""
    runs: int
    """The most sorted ranges that one device's rows consist of."""


@dataclass
class _Holding:
    """The devices that hold a parameter, and its gradients, by part (0 if not sharded)."""

    devices: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    gradients: dict[int, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    parts: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    places: set[Group] = field(default_factory=set)
    """The groups that compute with it."""


class _Checker:
    def __init__(
        self,
        dag: Dag,
        plans: Sequence[Plan],
        clip: bool,
        models: Mapping[int, Model],
        whole: bool = False,
    ) -> None:
        self.dag = dag
        self.plans = plans
        self.clip = clip
        self.whole = whole
        self.models = models
        self.class_of: dict[int, int] = {}
        for c, plan in enumerate(plans):
            for device in plan.devices:
                if device in self.class_of:
                    raise PlanError(f"device {device} has two plans")
                self.class_of[device] = c
        self.clocks = [_Clocks(plan) for plan in plans]
        self.bucket_of = {p: i for i, b in enumerate(dag.buckets) for p in b.parameters}
        self.lies_in = self._gradient_roles()
        self.first_replica: dict[tuple[int, int], int] = {}
        """For a gradient and a device that makes it, the first replica that makes the same."""
        self.holding = self._holding()

    def say(self, at: At) -> str:
        x = self.get(at)
        return f"{at[1]} {x.verb.value} {x.name} of devices {self.plans[at[0]].devices}"

    def get(self, at: At) -> Instruction:
        return self.plans[at[0]].instructions[at[1]]

    # participants

    def check_shape(self) -> None:
        """Each node is once in the plans of its devices, and the plans have nothing else."""
        wanted: Counter[tuple[int, int, Verb]] = Counter()
        for number, node in enumerate(self.dag.nodes):
            for verb, devices in _parts(node.op, node.devices):
                for c in self._classes(devices, number):
                    wanted[c, number, verb] += 1
        found: Counter[tuple[int, int, Verb]] = Counter()
        for c, plan in enumerate(self.plans):
            for pc, x in enumerate(plan.instructions):
                found[c, x.node, x.verb] += 1
                node = self.dag.nodes[x.node]
                rows = (node.devices, node.replicas) if x.verb is Verb.COMPUTE else ((), 1)
                if (x.op, tuple(x.rows)) != (node.op, rows):
                    raise PlanError(f"{self.say((c, pc))} is not {x.op} among {x.rows}")
                for w in x.waits:
                    if not 0 <= w < len(plan.instructions) or w == pc:
                        raise PlanError(f"{self.say((c, pc))} waits for {w}, which is nothing")
                if set(x.adds) - set(x.writes):
                    raise PlanError(f"{self.say((c, pc))} adds to what it does not write")
                if len({*x.reads}) < len(x.reads) or len({*x.writes}) < len(x.writes):
                    raise PlanError(f"{self.say((c, pc))} names a slot twice")
            if len({(g.value, g.microbatch) for g in plan.given}) < len(plan.given):
                raise PlanError(f"plan of {plan.devices} is given a tensor twice")
        for difference, what in ((wanted - found, "lacks"), (found - wanted, "has too much")):
            for c, number, verb in difference:
                raise PlanError(f"plan of {self.plans[c].devices} {what} {verb.value} of {number}")

    def _classes(self, devices: Group, number: int) -> list[int]:
        touched = dict.fromkeys(self.class_of[d] for d in devices)
        for c in touched:
            if not set(self.plans[c].devices) <= set(devices):
                raise PlanError(f"node {number} takes in only some of {self.plans[c].devices}")
        return list(touched)

    def check_passes(self) -> None:
        """Every chunk has its passes once per microbatch: all of them, or only the forward."""
        found: defaultdict[tuple[int, int], list[Pass]] = defaultdict(list)
        for node in self.dag.nodes:
            if isinstance(node.op, Compute):
                found[node.op.chunk, node.op.microbatch].append(node.op.which)
        for chunk in self.dag.model.chunks:
            facts = chunk.variants[self.dag.policy(chunk.index)].passes
            trains = any(p is not Pass.F for passes in found.values() for p in passes)
            whole = [p for p in (Pass.F, Pass.B) if p in facts and (trains or p is Pass.F)]
            halves = [Pass.F, *(p for p in HALVES if p in facts and trains)]
            for microbatch in range(self._microbatches()):
                passes = found[chunk.index, microbatch]
                if sorted(p.value for p in passes) not in (
                    sorted(p.value for p in whole),
                    sorted(p.value for p in halves),
                ):
                    raise PlanError(f"chunk {chunk.index} MB[{microbatch}] has passes {passes}")

    def _microbatches(self) -> int:
        return self.dag.microbatches[1] if self.dag.microbatches else 1

    def check_buckets(self) -> None:
        """Every parameter is in one bucket, with others of its dtype, frozen or trained alike."""
        held = Counter(p for bucket in self.dag.buckets for p in bucket.parameters)
        if held != dict.fromkeys(self.holding, 1):
            raise PlanError(f"parameters are not in one bucket each: {dict(held)}")
        for i, bucket in enumerate(self.dag.buckets):
            for p in bucket.parameters:
                facts = self.dag.model.parameters[p]
                alike = (bucket.trained, bucket.dtype, bucket.gradient)
                if (facts.trained, facts.dtype, facts.gradient) != alike:
                    raise PlanError(f"{p} is {facts}, in bucket {i}: {bucket}")
                self._check_blocks(i, p)
            self._check_places(i, bucket)

    def _check_places(self, i: int, bucket: Bucket) -> None:
        """Parameters do not overlap in the flat buffer: in sequence, or each within one part."""
        sizes = []
        for p in bucket.parameters:
            parts = len(self.holding[p].devices)
            sizes.append(math.prod(self.dag.model.parameters[p].shape) // parts)
        taken = sorted((at, at + n) for at, n in zip(bucket.offsets, sizes, strict=True) if n)
        apart = all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
        inside = not taken or (taken[0][0] >= 0 and taken[-1][1] <= bucket.share * bucket.within)
        even = bucket.share == -(-sum(sizes) // bucket.within)
        if bucket.within > 1 and not bucket.sliced:
            even = all(a // bucket.share == (b - 1) // bucket.share for a, b in taken)
        if tuple(sizes) != bucket.sizes or not (apart and inside and even):
            raise PlanError(f"the parameters of bucket {i} do not lie well: {bucket}")

    def _check_blocks(self, i: int, p: str) -> None:
        """The replicas of a parameter are those of its bucket. A copy is sharded as its rule says;
        where it must be gathered (ZeRO-3), over devices that compute together."""
        bucket, held = self.dag.buckets[i], self.holding[p]
        groups = [sorted(group) for group in bucket.groups]
        if groups != [sorted(held.devices[part]) for part in sorted(held.devices)]:
            raise PlanError(f"bucket {i} is over {groups}, but {p} is held by {held.devices}")
        rule = bucket.rule
        sharded = rule.zero == 3 or (rule.zero > 0 and bucket.trained)
        most = len(groups[0]) if sharded else 1
        if rule.zero == 3:
            alike = [
                Counter(frozenset(g for g in held.places if d in g) for d in group)
                for group in groups
            ]
            most = math.gcd(*(n for counts in alike for n in counts.values()))
        wanted = rule.within if rule.within is not None and sharded else most
        if bucket.within != wanted:
            raise PlanError(f"bucket {i} divides a copy over {bucket.within}, not {wanted}")
        for group in bucket.groups:
            for first in range(0, len(group), bucket.within):
                block = set(group[first : first + bucket.within])
                apart = [g for g in held.places if block & set(g) and not block <= set(g)]
                if rule.zero == 3 and apart:
                    raise PlanError(f"bucket {i}: {block} is only partly in {apart}")

    def check_meetings(self) -> None:
        """All members of a communicator (a stream and a group) enter its communications in the same
        order; so do any two plans, across all communicators."""
        for ours in range(len(self.plans)):
            for theirs in range(ours):
                self._same_order(ours, theirs)

    def _same_order(self, ours: int, theirs: int) -> None:
        rows = []
        for c in (ours, theirs):
            plan = self.plans[c]
            row = [x.node for x in plan.instructions if x.verb in COMMUNICATING]
            rows.append(list(dict.fromkeys(row)))
        common = set(rows[0]).intersection(rows[1])
        a, b = ([node for node in row if node in common] for row in rows)
        for one, other in zip(a, b, strict=True):
            if one != other:
                raise PlanError(
                    f"devices {self.plans[ours].devices} enter node {one} where devices "
                    f"{self.plans[theirs].devices} enter node {other}"
                )

    # order of execution

    def run(self) -> list[list[At]]:
        """One feasible order of execution; the participants of a communication are one entry."""
        queues: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for c, plan in enumerate(self.plans):
            for pc, x in enumerate(plan.instructions):
                queues[c, x.stream].append(pc)
        heads = dict.fromkeys(queues, 0)
        done: list[set[int]] = [set() for _ in self.plans]
        there: defaultdict[int, list[At]] = defaultdict(list)
        participants = Counter(
            x.node for plan in self.plans for x in plan.instructions if x.verb in COMMUNICATING
        )
        reached: set[At] = set()
        order: list[list[At]] = []

        def finish(together: list[At]) -> None:
            for c, pc in together:
                done[c].add(pc)
                self.clocks[c].finish(pc)
                heads[c, self.get((c, pc)).stream] += 1
            order.append(together)

        moved = True
        while moved:
            moved = False
            for key, queue in queues.items():
                while heads[key] < len(queue):
                    at = (key[0], queue[heads[key]])
                    x = self.get(at)
                    if at in reached or not done[key[0]].issuperset(x.waits):
                        break
                    moved = True
                    if x.verb not in COMMUNICATING:
                        finish([at])
                        continue
                    reached.add(at)
                    there[x.node].append(at)
                    if len(there[x.node]) == participants[x.node]:
                        finish(there[x.node])
        stuck = [
            self._why(k, queues[k][heads[k]], done) for k in queues if heads[k] < len(queues[k])
        ]
        if stuck:
            raise PlanError("deadlock:\n" + "\n".join(stuck))
        return order

    def _why(self, key: tuple[int, str], pc: int, done: list[set[int]]) -> str:
        at = (key[0], pc)
        waits = [w for w in self.get(at).waits if w not in done[key[0]]]
        if waits:
            return f"  {self.say(at)} waits for {', '.join(self.say((key[0], w)) for w in waits)}"
        node = self.get(at).node
        others = [
            self.say((c, p))
            for c, plan in enumerate(self.plans)
            for p, x in enumerate(plan.instructions)
            if x.node == node and x.verb in COMMUNICATING and (c, p) != at
        ]
        return f"  {self.say(at)} waits for {', '.join(others)}"

    def check_order(self) -> None:
        """The strategy's order holds on every device that runs both nodes."""
        for c, plan in enumerate(self.plans):
            at = {x.node: i for i, x in enumerate(plan.instructions)}
            for number, pc in at.items():
                for before in self.dag.nodes[number].after:
                    if before in at and not self.clocks[c].sure(at[before], pc):
                        raise PlanError(
                            f"{self.say((c, pc))} does not wait for {self.say((c, at[before]))}"
                        )

    # slots

    def check_slots(self, order: list[list[At]]) -> None:
        """No access to a slot races with a write to it, or to the memory that contains it."""
        for c, plan in enumerate(self.plans):
            writer: dict[int, int | None] = dict.fromkeys(plan.first_slots)
            readers: defaultdict[int, list[int]] = defaultdict(list)
            for pc in [p for together in order for k, p in together if k == c]:
                x = plan.instructions[pc]
                name = self.say((c, pc))
                for slot in x.allocates:
                    if slot in writer:
                        raise PlanError(f"{name} allocates s{slot}, which is there")
                    writer[slot] = pc
                lies_in = {b for slot in x.writes for b in plan.slots[slot].lies_in}
                for slot in (*x.reads, *x.adds, *lies_in):
                    if slot not in writer:
                        raise PlanError(f"{name} reads s{slot}, which nothing wrote")
                for slot in lies_in.difference(x.allocates):
                    self._must_follow(c, pc, [writer[slot]], slot)
                for slot in x.reads:
                    self._must_follow(c, pc, [writer[slot]], slot)
                    readers[slot].append(pc)
                for slot in x.writes:
                    if slot in writer and slot not in (*x.adds, *x.reads, *x.allocates):
                        raise PlanError(f"{name} writes s{slot}, which is live")
                    before = [p for p in (writer.get(slot), *readers.pop(slot, [])) if p != pc]
                    self._must_follow(c, pc, before, slot)
                    writer[slot] = pc

    def check_frees(self, c: int) -> None:
        """Every slot is freed once, by the last instruction that uses it, or is returned."""
        last: dict[int, int] = dict.fromkeys(self.plans[c].first_slots, -1)
        freed: dict[int, int] = {}
        for pc, x in enumerate(self.plans[c].instructions):
            last |= dict.fromkeys((*x.reads, *x.allocates, *x.writes), pc)
            again = [slot for slot in x.frees if slot in freed]
            self._must(not again, (c, pc), f"frees s{again}, which are freed")
            freed |= dict.fromkeys(x.frees, pc)
        for slot, *_ in self.plans[c].returned:
            if slot in freed or slot not in last:
                raise PlanError(f"plan of {self.plans[c].devices} returns s{slot}, which is free")
            del last[slot]
        if freed != last:
            wrong = sorted(s for s in last if freed.get(s) != last[s])
            raise PlanError(f"plan of {self.plans[c].devices} does not free s{wrong} in time")

    def _must_follow(self, c: int, pc: int, before: Iterable[int | None], slot: int) -> None:
        for b in before:
            if b is not None and not self.clocks[c].sure(b, pc):
                raise PlanError(
                    f"{self.say((c, pc))} does not wait for {self.say((c, b))}, "
                    f"which uses s{slot} too"
                )

    # contents

    def check_contents(self, order: list[list[At]]) -> None:
        """Every instruction reads the right contents; gradients, losses and norms arrive once,
        complete."""
        self.slots: list[dict[int, Any]] = [{} for _ in self.plans]
        self.grown = [{s for x in plan.instructions for s in x.adds} for plan in self.plans]
        self.updates: Counter[tuple[str, int]] = Counter()
        self.update_at: dict[tuple[int, int], int] = {}
        self.fresh: set[tuple[int, int]] = set()
        """(class, bucket) pairs that have gathered the updates of the previous step."""
        self.uses: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        """For each class and bucket, the instructions that read its parameters."""
        self.sums: Counter[Content] = Counter()
        self.normed: list[dict[int, Any]] = [{} for _ in self.plans]
        """For each class, the slots whose norm is taken before the updates, with their contents."""
        self.applied: list[set[int]] = [set() for _ in self.plans]
        """For each class, the gradient slots that its updates read, if gradients are clipped."""
        for c, plan in enumerate(self.plans):
            for slot, value, microbatch, rows in plan.given:
                self.slots[c][slot] = _Batch(value, microbatch, _sharing(plan, *rows))
                parts = len(rows.devices) // rows.copies
                self._starts(c, slot, self._model(parts).values[value].nbytes)
            for seed in plan.seeds:
                self.slots[c][seed.slot] = _Seed(seed.group)
                model = self._model(seed.group)
                parts = 1 if model.count is not None else seed.group * self._microbatches()
                found = seed.value, seed.parts
                self._agree(c, f"the seed s{seed.slot}", (model.loss, parts), found)
                self._starts(c, seed.slot, model.values[model.loss].nbytes)
        for together in order:
            x = self.get(together[0])
            for at in together:
                for slot in self.get(at).allocates:
                    self._allocate(at, slot)
            if x.verb is Verb.COMPUTE:
                self._compute(together[0])
            elif x.verb is Verb.UPDATE:
                self._update(together[0])
            elif x.verb is Verb.ADD:
                self._add(together[0])
            elif x.verb is Verb.COLLECTIVE:
                self._collective(together)
            elif x.verb in (Verb.SEND, Verb.RECV):
                self._transfer(together)

    def _starts(self, c: int, slot: int, nbytes: int) -> None:
        wanted = Slot(MemoryKind.BATCH, nbytes, nbytes)
        self._agree(c, f"s{slot}", wanted, self.plans[c].slots[slot])

    def _must(self, good: bool, at: At, what: str) -> None:
        if not good:
            raise PlanError(f"{self.say(at)} {what}")

    def _compute(self, at: At) -> None:
        c, x = at[0], self.get(at)
        node = self.dag.nodes[x.node]
        op = node.compute
        chunk = self.dag.model.chunks[op.chunk]
        policy = self.dag.policy(op.chunk)
        reads, writes = self.dag.table.wire(op.chunk, op.which, policy, op.microbatch)
        rows = self._in_order(reads)
        used: set[int] = set()
        if chunk.variants[policy].passes[op.which].uses_parameters:
            used = {self.bucket_of[p] for p in chunk.parameters}
        sharded = {b for b in used if self._sharded(b)}
        renewed = {b for b in used if self._renewed(b)}
        carried = self._carried(at, x.reads[len(rows) :])
        gathered = sharded | renewed if op.which is Pass.F else sharded
        extra = len(gathered) + bool(carried)
        self._must(len(x.reads) == len(rows) + extra, at, "reads the wrong number of slots")
        for (value, *added), slot in zip(rows, x.reads, strict=False):
            content = self.slots[c][slot]
            found, microbatch = self.dag.table.value(value)
            wanted: Any
            if found.role is Role.BATCH:
                groups = _sharing(self.plans[c], node.devices, node.replicas)
                wanted = _Batch(found.of, microbatch, groups)
            elif found.role is Role.SEED:
                wanted = _Seed(node.parts)
            else:
                form = self._form(op.chunk, value)
                wanted = _Tensor(value, node.devices, form, node.replicas, tuple(added))
                rows_of = self._rows(value, node.parts) if chunk.sorted_rows is None else None
                kept = rows_of is None or rows_of.sorted_in == node.parts
                self._must(kept, at, "reads rows in other parts than they were sorted in")
            self._must(content == wanted, at, f"wants {wanted}, s{slot} holds {content}")
        others = [self.slots[c][slot] for slot in x.reads[len(rows) :]]
        whole = [other for other in others if not isinstance(other, _Gradients)]
        expected = {_OfBucket(Content.PARAMETERS, b) for b in gathered}
        self._must(set(whole) == expected, at, f"wants {expected}, reads {whole}")
        for bucket in renewed:
            self._must((c, bucket) in self.fresh, at, f"uses bucket {bucket} as it was")
        for bucket in used - sharded:
            self.uses[c, bucket].append(at[1])
        self._must(len(x.writes) == len(writes), at, "writes the wrong number of slots")
        for value, slot in zip(writes, x.writes, strict=True):
            new: Any
            if self._role(value) in OF_PARAMETERS:
                parts = {d: Counter([(value, d)]) for d in self.plans[c].devices}
                names = tuple(p for p in chunk.parameters if self._is_of(value, p))
                new = _Gradients(parts, self._value_bytes(value, node.parts), names)
                if self._role(value) is Role.TIED_GRADIENT and carried:
                    self._must(carried.like(new), at, f"adds {new} to {carried}")
                    new = carried.plus(new)
            else:
                form = "uncombined" if self._dispatched(op.chunk, value) else "plain"
                new = _Tensor(value, node.devices, form, node.replicas)
            self._write(at, slot, new)

    def _in_order(self, reads: Iterable[int]) -> list[list[int]]:
        """The reads of a pass, each with the terms added to it. A gradient has a term from each
        chunk that reads its value, added from the last chunk to the first, as on one device."""
        rows: dict[object, list[int]] = {}
        for number in reads:
            value, microbatch = self.dag.table.value(number)
            gradient = value.role is Role.GRADIENT
            rows.setdefault((value.of, microbatch) if gradient else number, []).append(number)

        def turn(number: int) -> tuple[int, int]:
            value, _ = self.dag.table.value(number)
            return -value.by, value.term

        return [sorted(row, key=turn) for row in rows.values()]

    def _add(self, at: At) -> None:
        """Add the terms of one chunk to a gradient. Completeness and order are checked where the
        gradient is read."""
        c, x = at[0], self.get(at)
        node = self.dag.nodes[x.node]
        contents = [self.slots[c][slot] for slot in x.reads]
        for content in contents:
            good = isinstance(content, _Tensor) and self._role(content.value) is Role.GRADIENT
            good = good and content.form == "plain"
            good = good and (content.group, content.replicas) == (node.devices, node.replicas)
            self._must(good, at, f"adds {content}")
        first, *others = contents
        self._must(bool(others), at, "adds nothing")
        self._must(not any(other.added for other in others), at, "adds a sum to another")
        added = (*first.added, *(other.value for other in others))
        self._write(at, self._one(at, x.writes), replace(first, added=added))

    def _carried(self, at: At, slots: Sequence[int]) -> _Gradients | None:
        """The gradients of tied parameters that a pass takes and adds its own to, in place: those
        that later chunks on the same devices have made for the same microbatch. No other
        instruction may read them."""
        c, x = at[0], self.get(at)
        later = self._tied_later(self.dag.nodes[x.node])
        taken = [slot for slot in slots if isinstance(self.slots[c][slot], _Gradients)]
        self._must(len(taken) == bool(later), at, f"takes s{taken} for the gradients of {later}")
        if not later:
            return None
        alone = [y for y in self.plans[c].instructions if taken[0] in y.reads] == [x]
        self._must(alone, at, f"adds to s{taken[0]}, which others read")
        found: _Gradients = self.slots[c][taken[0]]
        wanted = {d: Counter({(v, d): 1 for v in later}) for d in self.plans[c].devices}
        good = found.parts == wanted and found.bucket is None
        self._must(good, at, f"takes {found}, wants the gradients {wanted}")
        return found

    def _tied_later(self, node: Node) -> list[int]:
        op = node.compute
        mine = self._made_gradients(op.chunk, op.which, op.microbatch, Role.TIED_GRADIENT)
        found = []
        for other in self.dag.nodes if mine else ():
            if not isinstance(other.op, Compute):
                continue
            if (other.devices, other.replicas) != (node.devices, node.replicas):
                continue
            later = other.op.chunk > op.chunk and other.op.microbatch == op.microbatch
            if later and not self._tied(op.chunk).isdisjoint(self._tied(other.op.chunk)):
                found += self._made_gradients(
                    other.op.chunk, other.op.which, op.microbatch, Role.TIED_GRADIENT
                )
        return found

    def _tied(self, chunk: int) -> set[str]:
        """The parameters of a chunk whose gradients it may add to those of other chunks."""
        return {
            p for (c, p), role in self.lies_in.items() if c == chunk and role is Role.TIED_GRADIENT
        }

    def _made_gradients(self, chunk: int, which: Pass, microbatch: int, role: Role) -> list[int]:
        _, writes = self.dag.table.wire(chunk, which, self.dag.policy(chunk), microbatch)
        return [value for value in writes if self._role(value) is role]

    def _gradient_roles(self) -> dict[tuple[int, str], Role]:
        """For each chunk and parameter it makes a gradient of, the role of the value that contains
        it: the chunk's own parameters, or those shared with other chunks."""
        chunks = self.dag.model.chunks
        users = Counter(p for chunk in chunks for p in {*chunk.parameters} - {*chunk.detached})
        found = {}
        for chunk in chunks:
            passes = chunk.variants[self.dag.policy(chunk.index)].passes
            apart = any(
                self._made_gradients(chunk.index, which, 0, Role.TIED_GRADIENT) for which in passes
            )
            for p in {*chunk.parameters} - {*chunk.detached}:
                tied = apart and users[p] > 1
                found[chunk.index, p] = OF_PARAMETERS[tied]
        return found

    def _allocate(self, at: At, slot: int) -> None:
        """Check a buffer that accumulates gradients: of a bucket, or of this pass alone."""
        c, x = at[0], self.get(at)
        kind = self.plans[c].slots[slot]
        self.slots[c][slot] = _Buffer(kind.bucket)
        if kind.bucket is None:
            good = slot in x.writes and slot in self.grown[c] and not kind.lies_in
            self._must(good, at, f"allocates s{slot} for nothing")
            return
        into = [k for k in self.plans[c].slots if slot in k.lies_in]
        self._must(bool(into) and kind.bucket < len(self.dag.buckets), at, f"allocates {kind}")
        bucket = self.dag.buckets[kind.bucket]
        each = Counter(name for k in into for name in k.names)
        names = tuple(p for p in bucket.parameters if each[p])
        self._must(
            max(each[p] for p in bucket.parameters) == 1, at, f"adds up two gradients in s{slot}"
        )
        nbytes = self._whole(kind.bucket, c) * bucket.gradient.itemsize
        dtypes = (bucket.gradient,) * len(names)
        wanted = Slot(MemoryKind.GRADIENTS, nbytes, nbytes, kind.bucket, names, dtypes)
        self._must(kind == wanted, at, f"allocates {kind}, needs {wanted}")

    def _write(self, at: At, slot: int, new: Any) -> None:
        c, x = at[0], self.get(at)
        if slot in x.adds:
            old = self.slots[c][slot]
            good = isinstance(old, _Gradients) and isinstance(new, _Gradients) and old.like(new)
            self._must(good, at, f"adds {new} to {old}")
            new = old.plus(new)
        else:
            found, wanted = self.plans[c].slots[slot], self._slot(at, slot, new)
            self._must(found == wanted, at, f"has {found} for s{slot}, needs {wanted}")
        self.slots[c][slot] = new

    def _slot(self, at: At, slot: int, content: Any) -> Slot:
        """The slot description that a plan must have where ``at`` writes ``content``."""
        c, x = at[0], self.get(at)
        nbytes = self._nbytes(c, content)
        found = self.plans[c].slots[slot]
        match content:
            case _Gradients(bucket=None, names=names):
                model = self.dag.model
                ways = self._ways(self.dag.nodes[x.node].compute.chunk)
                each = {
                    p: math.prod(model.parameters[p].shape)
                    // ways
                    * model.parameters[p].gradient.itemsize
                    for p in names
                }
                own = nbytes
                for buffer in found.lies_in:
                    own -= sum(each[p] for p in names if p in self.plans[c].slots[buffer].names)
                if slot in x.allocates:
                    own += sum(-n % 64 for n in each.values())
                elif not found.lies_in:
                    self._must(slot not in self.grown[c], at, f"does not allocate s{slot}")
                dtypes = tuple(model.parameters[p].gradient for p in names)
                return Slot(MemoryKind.GRADIENTS, nbytes, own, None, names, dtypes, found.lies_in)
            case _Gradients(bucket=bucket):
                if slot in x.reads:  # in place: checked when it was made
                    self._must(found.nbytes == nbytes, at, f"has {found} for {content}")
                    return found
                return Slot(MemoryKind.GRADIENTS, nbytes, nbytes, bucket)
            case _OfBucket(kind=Content.PARAMETERS, bucket=bucket):
                return Slot(MemoryKind.COMMUNICATION, nbytes, nbytes, bucket)
        holder = MemoryKind.COMMUNICATION
        if x.verb in (Verb.COMPUTE, Verb.ADD) and content.form != "uncombined":
            kept = self._role(content.value) in OF_BACKWARD
            holder = MemoryKind.SAVED if kept else MemoryKind.ACTIVATIONS
        return Slot(holder, nbytes, nbytes)

    def _one(self, at: At, slots: Sequence[int]) -> int:
        self._must(len(slots) == 1, at, f"names {slots}, and not one slot")
        return slots[0]

    def _is(self, at: At, content: Content, of: int) -> None:
        """The instruction declares the right content."""
        x = self.get(at)
        good = (x.content, x.of) == (content, of)
        self._must(good, at, f"moves {content} of {of}, says {x.content} of {x.of}")

    def _transfer(self, together: list[At]) -> None:
        op = self.dag.nodes[self.get(together[0]).node].op
        assert isinstance(op, Transfer)
        sent = set()
        for at in together:
            if self.get(at).verb is Verb.SEND:
                content = self.slots[at[0]][self._one(at, self.get(at).reads)]
                self._must(isinstance(content, _Tensor), at, f"sends {content}")
                good = (content.group, content.replicas) == (op.source, op.replicas[0])
                good = good and content.form == "plain"
                self._must(good, at, f"sends {content}")
                form, counted = "plain", self._counted(content.value, *op.parts)
                if counted is not None and counted.runs > 1:
                    form = "runs"
                wanted = None if counted is None else counted.own
                self._must(op.counts == wanted, at, f"counts {op.counts} rows, not {wanted}")
                sent.add(replace(content, group=op.target, replicas=op.replicas[1], form=form))
        self._must(len(sent) == 1, together[0], f"sends several values: {sent}")
        (come,) = sent
        for at in together:
            self._is(at, Content.VALUE, self.dag.table.value(come.value)[0].of)
            if self.get(at).verb is Verb.RECV:
                self._write(at, self._one(at, self.get(at).writes), come)

    def _collective(self, together: list[At]) -> None:
        op = self.dag.nodes[self.get(together[0]).node].op
        assert isinstance(op, Collective)
        members = [d for group in op.groups for d in group]
        present = [d for c, _ in together for d in self.plans[c].devices]
        self._must(sorted(members) == sorted(present), together[0], "is not done by its groups")
        if op.kind is Move.ALL_TO_ALL:
            for at in together:
                self._all_to_all(at, op)
        elif op.kind is Move.ALL_GATHER:
            for at in together:
                self._gather(at, op)
        elif self.get(together[0]).content is Content.OUTPUT:
            self._mean(together, op)
        elif self.get(together[0]).content in (Content.LOSS, Content.NORM):
            self._sum_up(together, op)
        elif self.get(together[0]).content is Content.LOAD:
            self._load(together, op)
        else:
            self._reduce(together, op)

    def _all_to_all(self, at: At, op: Collective) -> None:
        target = self._one(at, self.get(at).writes)
        self._must(bool(self.get(at).reads), at, "dispatches or combines nothing")
        slot, *counted = self.get(at).reads
        content = self.slots[at[0]][slot]
        self._must(isinstance(content, _Tensor), at, f"dispatches or combines {content}")
        flat = sorted(d for group in op.groups for d in group)
        good = flat == sorted(content.group) and content.form in ("plain", "uncombined", "runs")
        ranks = [[content.group.index(d) for d in group] for group in op.groups if good]
        steps = {b - a for row in ranks for a, b in itertools.pairwise(row)}
        good = good and len(steps) <= 1 and all(step > 0 for step in steps)
        self._must(good, at, f"dispatches or combines {content}")
        there = content.form != "uncombined"
        self._must((op.dispatches, op.combines) == (there, not there), at, f"is {op}")
        self._is(at, Content.VALUE, self.dag.table.value(content.value)[0].of)
        form = "dispatched" if there else "plain"
        made = replace(content, form=form)
        rows = self._rows(content.value, content.parts)
        wanted = None if rows is None else rows.room if there else rows.own
        self._must(op.rows == wanted, at, f"has room for {op.rows} rows, not {wanted}")
        found = [self.slots[at[0]][slot] for slot in counted]
        counts = []
        runs = self._sorted_runs(content.value, content.parts)
        if rows is not None:
            forms = "runs" if runs > 1 else "plain", "dispatched"
            counts = [replace(content, value=rows.counts, form=f, added=()) for f in forms]
        self._must(found == counts, at, f"goes by the counts {found}, not {counts}")
        self._must(op.runs == runs, at, f"merges {op.runs} runs, not {runs}")
        self._write(at, target, made)

    def _rows(self, value: int, parts: int) -> _Rows | None:
        """The rows of a value that experts read or write sorted by expert; otherwise None."""
        found, microbatch = self.dag.table.value(value)
        if found.role not in (Role.ACTIVATION, Role.GRADIENT):
            return None
        for chunk in self._model(parts).chunks:
            rows = chunk.sorted_rows
            if rows is None or found.of not in (*chunk.inputs, *chunk.outputs):
                continue
            counts = chunk.inputs[rows.counts]
            if found.of == counts:
                return None
            ways, capacity = 1, None
            if chunk.index in self.dag.shards:
                rule = self.dag.shards[chunk.index]
                ways, capacity = rule.ways, rule.capacity
            most = rows.rows * ways
            room = most
            if capacity is not None:
                room = min(most, -(-math.ceil(rows.rows * capacity) // ways) * ways)
            maker = next(c.index for c in self.dag.model.chunks if counts in c.outputs)
            number = self.dag.table.number(Value(Role.ACTIVATION, counts, maker), microbatch)
            sorted_in = self.dag.source(number).parts
            return _Rows(number, rows.rows, room, sorted_in, _most_shared(sorted_in, parts))
        return None

    def _sorted_runs(self, value: int, parts: int) -> int:
        """The number of sorted ranges in the rows of a value, or in the rows that it counts."""
        if (rows := self._rows(value, parts)) is not None:
            return rows.runs
        found, _ = self.dag.table.value(value)
        for chunk in self.dag.model.chunks:
            rows_of = chunk.sorted_rows
            if rows_of is not None and found.of == chunk.inputs[rows_of.counts]:
                made = self.dag.source(value)
                return _most_shared(made.parts, parts)
        return 1

    def _counted(self, value: int, source: int, target: int) -> _Rows | None:
        """For counts sent to a group of another size, the rows they count on the sending group."""
        found, _ = self.dag.table.value(value)
        for chunk in self._model(source).chunks if source != target else ():
            rows = chunk.sorted_rows
            if rows is not None and found.of == chunk.inputs[rows.counts]:
                return _Rows(value, rows.rows, 0, source, _most_shared(source, target))
        return None

    def _load(self, together: list[At], op: Collective) -> None:
        """The counts of one chunk from all microbatches and devices, each once."""
        chunk = self.get(together[0]).of
        known = chunk in range(len(self.dag.model.chunks))
        self._must(known, together[0], f"counts the load of chunk {chunk}, which is not there")
        rows = self.dag.model.chunks[chunk].sorted_rows
        everyone = sorted(d for plan in self.plans for d in plan.devices) == sorted(op.groups[0])
        good = rows is not None and everyone and op.kind is Move.ALL_REDUCE
        self._must(good, together[0], f"is {op}, not the load of experts over all devices")
        assert rows is not None
        counts = self.dag.model.chunks[chunk].inputs[rows.counts]
        found: Counter[tuple[int, int]] = Counter()
        for at in together:
            self._is(at, Content.LOAD, chunk)
            for slot in self.get(at).reads:
                content = self.slots[at[0]][slot]
                good = isinstance(content, _Tensor) and content.form == "plain"
                self._must(good, at, f"sums {content}")
                found.update((content.value, d) for d in self.plans[at[0]].devices)
            self._write(at, self._one(at, self.get(at).writes), _OfAll(Content.LOAD, chunk))
        wanted = Counter(
            (value, d)
            for node in self.dag.nodes
            if isinstance(node.op, Compute)
            for value in node.writes
            if value < self.dag.first_extra
            and self._role(value) is Role.ACTIVATION
            and self.dag.table.value(value)[0].of == counts
            for d in node.devices[:: node.replicas]
        )
        self._must(found == wanted, together[0], f"sums {found}, should sum {wanted}")
        self.sums[Content.LOAD] += 1

    def _gather(self, at: At, op: Collective) -> None:
        c, x = at[0], self.get(at)
        target = self._one(at, x.writes)
        bucket = self._bucket(at)
        self._must(not x.reads, at, "waits for something")
        self.uses[c, bucket].append(at[1])
        if self._renewed(bucket):
            self._must((c, bucket) not in self.fresh, at, f"gathers bucket {bucket} again")
            self.fresh.add((c, bucket))
        else:
            self._must(self._sharded(bucket), at, "gathers what is whole")
        self._is(at, Content.PARAMETERS, bucket)
        for group in op.groups:
            self._must(group in self._blocks(bucket), at, f"is among {group}, who have no copy")
        self._write(at, target, _OfBucket(Content.PARAMETERS, bucket))

    def _renewed(self, bucket: int) -> bool:
        """Whether a step begins without the parts of a bucket that other devices updated."""
        found = self.dag.buckets[bucket]
        return found.rule.zero in (1, 2) and found.within > 1 and found.trained

    def _bucket(self, at: At) -> int:
        """The bucket that a node's result belongs to."""
        value = self.dag.nodes[self.get(at).node].writes[0]
        self._must(value >= self.dag.first_extra, at, "makes a value of the model")
        return self.dag.extra[value - self.dag.first_extra].of

    def _blocks(self, bucket: int) -> list[Group]:
        """The shard groups of a bucket: devices that hold one copy, a part each, in order."""
        found = self.dag.buckets[bucket]
        return [
            group[first : first + found.within]
            for group in found.groups
            for first in range(0, len(group), found.within)
        ]

    def _reduce(self, together: list[At], op: Collective) -> None:
        bucket = self._bucket(together[0])
        shards = self.dag.buckets[bucket].rule.zero > 0 and self.dag.buckets[bucket].within > 1
        again = shards and op.kind is Move.ALL_REDUCE
        local: dict[int, Counter[tuple[int, int]]] = {}
        for at in together:
            c = at[0]
            self._is(at, Content.GRADIENTS, bucket)
            reads = list(self.get(at).reads)
            if reads and self.slots[c][reads[-1]] == _Buffer(bucket):
                self._check_buffer(at, reads.pop(), reads)
            for slot in reads:
                content = self.slots[c][slot]
                self._must(isinstance(content, _Gradients), at, f"reduces {content}")
                own = content.bucket == bucket and content.scattered
                good = own if again else content.bucket is None
                self._must(good, at, f"reduces {content}")
                for d, part in content.parts.items():
                    local[d] = local.get(d, Counter()) + part
        total: dict[int, Counter[tuple[int, int]]] = {}
        for group in op.groups:
            summed: Counter[tuple[int, int]] = Counter()
            for d in group:
                summed += local.get(d, Counter())
            total.update(dict.fromkeys(group, summed))
        scattered = again or op.kind is Move.REDUCE_SCATTER
        self._check_sides(together[0], op, bucket, again)
        for at in together:
            target = self._one(at, self.get(at).writes)
            count = self._part(bucket, at[0]) if scattered else self._whole(bucket, at[0])
            nbytes = count * self.dag.buckets[bucket].gradient.itemsize
            parts = {d: total[d] for d in self.plans[at[0]].devices}
            self._must(
                scattered or not self._is_buffer(at) or target in self.get(at).reads,
                at,
                "copies what it could change in place",
            )
            self._write(at, target, _Gradients(parts, nbytes, (), bucket, scattered))
        # _update checks the participants, by the gradients that arrive

    def _is_buffer(self, at: At) -> bool:
        reads = self.get(at).reads
        return bool(reads) and isinstance(self.slots[at[0]][reads[-1]], _Buffer)

    def _check_buffer(self, at: At, buffer: int, reads: Sequence[int]) -> None:
        """The buffer contains exactly the gradients that are reduced."""
        kinds = self.plans[at[0]].slots
        there = {slot for slot, kind in enumerate(kinds) if buffer in kind.lies_in}
        self._must(there == set(reads), at, f"reduces {reads}, but {there} are in s{buffer}")

    def _check_sides(self, at: At, op: Collective, bucket: int, again: bool) -> None:
        """Parts are scattered within a shard group and summed over devices with the same part.
        ``_update`` finds missing participants by the gradients that arrive."""
        blocks = self._blocks(bucket)
        if op.kind is Move.REDUCE_SCATTER:
            self._must(all(g in blocks for g in op.groups), at, f"scatters among {op.groups}")
        elif again:
            rank = {d: i for block in blocks for i, d in enumerate(block)}
            alike = all(len({rank[d] for d in group}) == 1 for group in op.groups)
            self._must(alike, at, f"sums different parts: {op.groups}")

    def _sum_up(self, together: list[At], op: Collective) -> None:
        """The sum of a scalar over all devices: the losses, or the squared gradient norms."""
        kind = self.get(together[0]).content
        assert kind is not None
        self.sums[kind] += 1
        everyone = op.groups == (tuple(sorted(self.class_of)),)
        good = everyone and op.kind is Move.ALL_REDUCE
        self._must(good, together[0], f"is {op}, not a sum over all devices")
        losses: Counter[tuple[int, int]] = Counter()
        for at in together:
            c = at[0]
            self._is(at, kind, 0)
            contents = {slot: self.slots[c][slot] for slot in self.get(at).reads}
            wanted_buckets = self._updated(c) if self.clip and kind is Content.NORM else ()
            found = self.get(at).buckets
            self._must(found == wanted_buckets, at, f"is of {found}, not {wanted_buckets}")
            if kind is Content.LOSS:
                for content in contents.values():
                    good = isinstance(content, _Tensor) and content.form == "plain"
                    self._must(good, at, f"sums {content}")
                    losses.update((content.value, d) for d in self.plans[c].devices)
                self._losses_first(at, [t.value for t in contents.values()])
            elif self.clip:
                self.normed[c] = contents  # _update checks whose norm it is
            else:
                self._squares(at, list(contents.values()))
            self._write(at, self._one(at, self.get(at).writes), _OfAll(kind))
        if kind is Content.LOSS:
            wanted = self._losses()
            self._must(losses == wanted, together[0], f"sums {losses}, should sum {wanted}")

    def _mean(self, together: list[At], op: Collective) -> None:
        """The mean of a scalar output over the parts of all microbatches."""
        of = self.get(together[0]).of
        scalar = of in self.dag.model.outputs and not self.dag.model.values[of].shape
        everyone = op.groups == (tuple(sorted(self.class_of)),)
        good = scalar and everyone and op.kind is Move.ALL_REDUCE
        self._must(good, together[0], f"is {op}, not the mean of an output over all devices")
        parts = {v: n.parts for n in self.dag.nodes for v in n.writes}
        found: Counter[tuple[int, int]] = Counter()
        for at in together:
            self._is(at, Content.OUTPUT, of)
            x, weights = self.get(at), []
            for slot in x.reads:
                content = self.slots[at[0]][slot]
                good = isinstance(content, _Tensor) and content.form == "plain"
                self._must(good, at, f"sums {content}")
                found.update((content.value, d) for d in self.plans[at[0]].devices)
                weights.append(1 / (self._microbatches() * parts[content.value]))
            self._must(x.weights == tuple(weights), at, f"weighs by {x.weights}, not {weights}")
            self._write(at, self._one(at, x.writes), _OfAll(Content.OUTPUT, of))
        wanted = self._made({of})
        self._must(found == wanted, together[0], f"sums {found}, should sum {wanted}")
        self.sums[Content.OUTPUT] += 1

    def check_returned(self) -> None:
        """Every block of rows of every output with rows is returned once."""
        values = self.dag.model.values
        wanted = self._made({of for of in self.dag.model.outputs if values[of].shape})
        found: Counter[tuple[int, int]] = Counter()
        for c, plan in enumerate(self.plans):
            for slot, value, microbatch, shards in plan.returned:
                content = self.slots[c][slot]
                good = isinstance(content, _Tensor) and content.form == "plain"
                if not good or self.dag.table.value(content.value)[0].of != value:
                    raise PlanError(f"devices {plan.devices}: s{slot} is {content}, not {value}")
                maker = next(n for n in self.dag.nodes if content.value in n.writes)
                rows = tuple(maker.replica(maker.devices.index(d)) for d in plan.devices)
                if maker.compute.microbatch != microbatch or rows != _sharing(plan, *shards):
                    raise PlanError(f"devices {plan.devices}: s{slot} is of other rows")
                found.update((content.value, d) for d in plan.devices)
                self.slots[c][slot] = None
        if found != wanted:
            raise PlanError(f"{found} is returned, should be {wanted}")

    def _squares(self, at: At, contents: list[Any]) -> None:
        """The norm taken after the updates covers every bucket that the device updated, once."""
        good = all(isinstance(u, _OfBucket) and u.kind is Content.SQUARES for u in contents)
        self._must(good, at, f"sums {contents}")
        found = Counter(u.bucket for u in contents)
        mine = self.plans[at[0]].devices[0]
        held = {
            self.bucket_of[p] for p, h in self.holding.items() if h.gradients and mine in h.parts
        }
        self._must(found == dict.fromkeys(held, 1), at, f"sums {found}, should sum {held}")

    def _losses_first(self, at: At, values: list[int]) -> None:
        """A worker takes the first half as losses and the second as counts, if there are counts."""
        found = [self.dag.table.value(value)[0].of for value in values]
        kinds = [self.dag.model.loss, self.dag.model.count]
        wanted = [of for of in kinds if of is not None]
        rows = len(found) // len(wanted)
        self._must(found == [of for of in wanted for _ in range(rows)], at, f"sums {found}")
        made = {v: n.parts for n in self.dag.nodes for v in n.writes}
        most = max(made[value] for value, _ in self._losses())
        weights = tuple(1.0 if rows < len(found) else most / made[v] for v in values[:rows])
        said = self.get(at).weights
        self._must(said == weights, at, f"weighs losses by {said}, should by {weights}")

    def _updated(self, c: int) -> tuple[int, ...]:
        """The buckets that a class updates, in order."""
        rows = self.plans[c].instructions
        return tuple(x.op.bucket for x in rows if isinstance(x.op, Update))

    def _losses(self) -> dict[tuple[int, int], int]:
        """The loss of each microbatch, and its count, once from each device that computes it."""
        return self._made({self.dag.model.loss, self.dag.model.count} - {None})

    def _made(self, wanted: set[int | None]) -> dict[tuple[int, int], int]:
        """The ``wanted`` activations of all microbatches, once per device that computes them."""
        found = {}
        for node in self.dag.nodes:
            if isinstance(node.op, Compute):
                policy = self.dag.policy(node.op.chunk)
                _, writes = self.dag.table.wire(
                    node.op.chunk, node.op.which, policy, node.op.microbatch
                )
                for value in writes:
                    made = self.dag.table.value(value)[0]
                    if made.role is Role.ACTIVATION and made.of in wanted:
                        found.update({(value, d): 1 for d in node.devices[:: node.replicas]})
        return found

    def _update(self, at: At) -> None:
        c, x = at[0], self.get(at)
        op = self.dag.nodes[x.node].op
        assert isinstance(op, Update)
        bucket = self.dag.buckets[op.bucket]
        every = self._updated(c)
        steps = (op.bucket,) if not self.whole else every if op.bucket == every[-1] else ()
        self._must(x.buckets == steps, at, f"steps on {x.buckets}, should on {steps}")
        read = {slot: self.slots[c][slot] for slot in x.reads}
        scalars = [g.kind for g in read.values() if isinstance(g, _OfAll)]
        wanted = [Content.LOSS] * (self.dag.model.count is not None)
        wanted += [Content.NORM] * self.clip
        self._must(scalars == wanted, at, f"reads {scalars}, must read {wanted}")
        read = {slot: g for slot, g in read.items() if not isinstance(g, _OfAll)}
        contents = list(read.values())
        self._must(all(isinstance(g, _Gradients) for g in contents), at, f"reads {contents}")
        if self.whole:
            contents = self._own(at, op.bucket, read)
        if self.clip:
            self.applied[c].update(read)
            same = all(self.normed[c].get(slot) == g for slot, g in read.items())
            self._must(same, at, "reads other gradients than the norm is of")
        of = {g.bucket for g in contents}
        self._must(of in ({None}, {op.bucket}), at, f"reads gradients of buckets {of}")
        scattered = {g.scattered for g in contents}
        self._must(len(scattered) == 1, at, "reads whole and sharded gradients")
        for d in self.plans[c].devices:
            found: Counter[tuple[int, int]] = sum((g.parts[d] for g in contents), Counter())
            for p in bucket.parameters:
                if self.dag.model.parameters[p].trained:
                    self._check_sum(at, d, p, found)
                    self.updates[p, d] += 1
        self.update_at[c, op.bucket] = at[1]
        target = self._one(at, x.writes)
        self._write(at, target, _OfBucket(Content.SQUARES, op.bucket, scattered == {True}))

    def _own(self, at: At, bucket: int, read: dict[int, Any]) -> list[Any]:
        """The gradients that an update reads for its own bucket. If the optimizer steps once, the
        last update must read the gradients of all updates, unchanged: they are held until then."""
        c = at[0]
        updates = [
            (pc, y) for pc, y in enumerate(self.plans[c].instructions) if y.verb is Verb.UPDATE
        ]
        own = [g for g in read.values() if g.bucket == bucket]
        own = own or [g for g in read.values() if g.bucket is None]
        if at[1] == updates[-1][0]:
            others = {s for _, y in updates for s in y.reads}
            scalars = {s for s in others if isinstance(self.slots[c].get(s), _OfAll)}
            self._must(others - scalars == set(read), at, "does not read all gradients")
        return own

    def _check_sum(self, at: At, d: int, p: str, found: Counter[tuple[int, int]]) -> None:
        held = self.holding[p]
        self._must(len(held.parts[d]) == 1, at, f"has parts {held.parts[d]} of {p} on {d}")
        wanted = held.gradients[next(iter(held.parts[d]))]
        mine: Counter[tuple[int, int]] = Counter()
        for g, n in found.items():
            if self._is_of(g[0], p):
                mine[g[0], self.first_replica[g]] += n
        if mine != dict.fromkeys(wanted, 1):
            missing = [self._gradient(g) for g in sorted(wanted - set(mine))]
            wrong = [f"{n} x {self._gradient(g)}" for g, n in mine.items() if g not in wanted]
            many = [f"{n} x {self._gradient(g)}" for g, n in mine.items() if g in wanted and n > 1]
            raise PlanError(
                f"{self.say(at)}: gradient of {p} on {d}: missing {missing}, wrong {wrong}, "
                f"too often {many}"
            )

    def _is_of(self, gradient: int, p: str) -> bool:
        """Whether a value contains the gradient of a parameter."""
        value, _ = self.dag.table.value(gradient)
        return self.lies_in.get((value.of, p)) is value.role

    def _gradient(self, gradient: tuple[int, int]) -> str:
        value, microbatch = self.dag.table.value(gradient[0])
        short = "dt" if value.role is Role.TIED_GRADIENT else "dw"
        return f"{short}{value.of}.{microbatch}@{gradient[1]}"

    # state

    def check_state(self) -> None:
        """Every trained parameter is updated once on each device that holds it, after all uses."""
        for p, held in self.holding.items():
            if not held.gradients:
                continue
            for d in held.parts:
                if self.updates[p, d] != 1:
                    raise PlanError(f"{p} is updated {self.updates[p, d]} times on device {d}")
        for (c, bucket), pcs in self.uses.items():
            update = self.update_at.get((c, bucket))
            for pc in pcs if update is not None else ():
                if not self.clocks[c].sure(pc, update) and pc not in self._causes((c, update)):
                    raise PlanError(
                        f"{self.say((c, update))} does not wait for {self.say((c, pc))}, "
                        "which uses its parameters"
                    )
        trains = any(held.gradients for held in self.holding.values())
        once = {Content.LOSS: 1} | ({Content.NORM: 1} if trains else {})
        if loads := sum(chunk.sorted_rows is not None for chunk in self.dag.model.chunks):
            once[Content.LOAD] = loads
        values = self.dag.model.values
        if numbers := sum(not values[of].shape for of in self.dag.model.outputs):
            once[Content.OUTPUT] = numbers
        if self.sums != once:
            raise PlanError(f"the scalars are summed {self.sums}")
        for c, seen in enumerate(self.normed):
            if seen.keys() != self.applied[c]:
                raise PlanError(
                    f"plan of {self.plans[c].devices}: the norm is of {sorted(seen)}, "
                    f"the updates are of {sorted(self.applied[c])}"
                )

    def check_buffers(self) -> None:
        """All forwards that use a changing buffer are on one device. Each is ordered with every
        forward that changes the buffer: by microbatch, then by chunk."""
        chunks = self.dag.model.chunks
        for name in {name for chunk in chunks for name in chunk.changes}:
            users = {c.index for c in chunks if name in (*c.changes, *c.buffers)}
            rows = [self._forwards(c, users) for c in range(len(self.plans))]
            (c, row), *others = [(c, row) for c, row in enumerate(rows) if row]
            if others or len(self.plans[c].devices) > 1:
                raise PlanError(f"{self.say((c, row[0][2]))} shares the changing buffer {name}")
            for i, (_, later, pc) in enumerate(row):
                for _, earlier, before in row[:i]:
                    changes = name in (*chunks[earlier].changes, *chunks[later].changes)
                    if changes and not self.clocks[c].sure(before, pc):
                        raise PlanError(
                            f"{self.say((c, pc))} does not wait for {self.say((c, before))}, "
                            f"which uses the changing buffer {name} before it"
                        )

    def _forwards(self, c: int, chunks: set[int]) -> list[tuple[int, int, int]]:
        """(microbatch, chunk, pc) of these chunks' forwards, in the order of a single device."""
        found = []
        for pc, x in enumerate(self.plans[c].instructions):
            op = x.op
            if isinstance(op, Compute) and op.which is Pass.F and op.chunk in chunks:
                found.append((op.microbatch, op.chunk, pc))
        return sorted(found)

    def _causes(self, at: At) -> set[int]:
        """The instructions of the same class that must end before ``at`` starts, also by way of
        other devices: a result sent there may return as an input."""
        sends: defaultdict[int, list[At]] = defaultdict(list)
        for c, plan in enumerate(self.plans):
            for pc, x in enumerate(plan.instructions):
                if x.verb in (Verb.SEND, Verb.COLLECTIVE):
                    sends[x.node].append((c, pc))
        seen = {at}
        left = [at]
        while left:
            c, pc = left.pop()
            x = self.get((c, pc))
            before = [(c, w) for w in x.waits]
            if pc in self.clocks[c].previous:
                before.append((c, self.clocks[c].previous[pc]))
            if x.verb in (Verb.RECV, Verb.COLLECTIVE) and (c, pc) != at:
                before += sends[x.node]
            left += [b for b in before if b not in seen]
            seen.update(before)
        return {pc for c, pc in seen if c == at[0]}

    # memory

    def check_memory(self, c: int, memory: Memory, optimizer_bytes: float) -> None:
        """The predicted memory is the sum over the plan's slots, state and instructions."""
        plan = self.plans[c]
        held: Counter[MemoryKind] = Counter()
        for bucket in {
            self.bucket_of[p] for p, h in self.holding.items() if plan.devices[0] in h.parts
        }:
            rule = self.dag.buckets[bucket]
            kept = self._part(bucket, c) if self._sharded(bucket) else self._whole(bucket, c)
            held[MemoryKind.PARAMETERS] += kept * rule.dtype.itemsize
            copied = rule.gradient != rule.dtype
            updated = self._part(bucket, c) * rule.gradient.itemsize
            state_bytes = optimizer_bytes if rule.trained else 0
            held[MemoryKind.OPTIMIZER] += int(updated * (state_bytes + copied))
        used = {x.op.chunk for x in plan.instructions if isinstance(x.op, Compute)}
        for name in {b for chunk in used for b in self.dag.model.chunks[chunk].buffers}:
            held[MemoryKind.BUFFERS] += self.dag.model.buffers.get(name, 0)
        state = (held[MemoryKind.PARAMETERS], held[MemoryKind.OPTIMIZER])
        self._agree(c, "state", state, (memory.parameters, memory.optimizer))
        live = set(plan.first_slots)
        held[MemoryKind.BATCH] += sum(plan.slots[slot].own for slot in live)
        moments = [(held.total(), -1, dict(held))]
        over_time = []
        over = self._over(plan)
        later: defaultdict[int, Counter[MemoryKind]] = defaultdict(Counter)
        """For each communication, the memory released when it ends."""
        for pc, x in enumerate(plan.instructions):
            before = len(moments)
            for done in [p for p, end in over.items() if end == pc]:
                ended = plan.instructions[done]
                if extra := self._at_end(c, ended):
                    busy = held + Counter({MemoryKind.WORKSPACE: extra})
                    moments.append((busy.total(), pc, dict(busy)))
                held.subtract(later.pop(done, Counter()))
            for slot in {*x.allocates, *x.writes} - live:
                live.add(slot)
                held[plan.slots[slot].holder] += plan.slots[slot].own
            if beside := self._beside(c, x):
                held[MemoryKind.COMMUNICATION] += beside
                later[pc][MemoryKind.COMMUNICATION] += beside
            busy = held + Counter({MemoryKind.WORKSPACE: self._busy(c, x)})
            moments.append((busy.total(), pc, dict(busy)))
            self._check_temporaries(c, x)
            during = max(total for total, _, _ in moments[before:])
            for slot in x.frees:
                live.remove(slot)
                if x.content in (Content.LOAD, Content.OUTPUT) and slot in x.writes:
                    continue  # the caller holds it until the step ends
                gone = Counter({plan.slots[slot].holder: plan.slots[slot].own})
                sends = [
                    p
                    for p, y in enumerate(plan.instructions[: pc + 1])
                    if slot in y.reads and self._sends(c, y, slot) and over[p] > pc
                ]
                if sends:
                    later[max(sends, key=lambda p: over[p])].update(gone)
                else:
                    held.subtract(gone)
            over_time.append((during, held.total()))
        peak = max(total for total, _, _ in moments)
        self._agree(c, "peak", peak, memory.peak)
        self._agree(c, "over_time", tuple(over_time), tuple(memory.over_time))
        first = next(moment for moment in moments if moment[0] == peak)
        self._agree(c, "peak_at", first[1], memory.peak_at)
        found = {holder: n for holder, n in memory.at_peak.items() if n}
        wanted = {holder: n for holder, n in first[2].items() if n}
        self._agree(c, "at_peak", wanted, found)
        self._agree(c, "sum of at_peak", sum(memory.at_peak.values()), memory.peak)

    def _agree(self, c: int, what: str, wanted: object, found: object) -> None:
        if wanted != found:
            raise PlanError(f"plan of {self.plans[c].devices}: {what} is {wanted}, not {found}")

    def _check_temporaries(self, c: int, x: Instruction) -> None:
        if isinstance(x.op, Update):
            return
        if x.verb in BESIDE:
            holds = {slot for slot in x.reads if self._sends(c, x, slot)}
            if x.content in (Content.LOAD, Content.OUTPUT):
                holds.update(x.writes)  # for the caller
            self._agree(c, f"what {x.name} holds", holds, set(x.holds))
        wanted = self._busy(c, x), self._beside(c, x), self._at_end(c, x)
        self._agree(c, f"bytes of {x.name}", wanted, (x.workspace, x.beside, x.at_end))

    def _at_end(self, c: int, x: Instruction) -> int:
        """Bytes that a communication needs at its end, to reorder the received rows."""
        merged = _combines(x) and _runs(x) > 1
        if not merged and (not _dispatches(x) or _by_count(x)):
            return 0
        extra = self.plans[c].slots[x.writes[0]].nbytes
        return extra + (self._merging(c, x) if merged else 0)

    def _sends(self, c: int, x: Instruction, slot: int) -> bool:
        """Whether a communication sends directly from a slot, without a copy."""
        if x.content is Content.GRADIENTS:
            return self.plans[c].slots[slot].bucket is not None
        goes = x.verb is Verb.SEND or _dispatches(x) or _by_count(x)
        return goes and not self._copy(x)

    def _over(self, plan: Plan) -> dict[int, int]:
        """For each communication and copy, the first instruction that waits for its end."""
        over = {
            p: len(plan.instructions) for p, x in enumerate(plan.instructions) if x.verb in BESIDE
        }
        brings: dict[int, int] = {}
        for pc, x in enumerate(plan.instructions):
            reads = x.reads[:-1] if _in_turn(plan, x, brings) else x.reads
            needed = {*x.waits, *(brings[s] for s in (*reads, *x.adds) if s in brings)}
            for p in needed:
                if p in over:
                    over[p] = min(over[p], pc)
            if x.verb in COMMUNICATING:
                brings |= dict.fromkeys(x.writes, pc)
        return over

    def check_copies(self) -> None:
        """If state is copied, each bucket that a device updates is copied once, before the
        update."""
        for c, plan in enumerate(self.plans):
            found: dict[int, int] = {}
            for pc, x in enumerate(plan.instructions):
                if isinstance(x.op, Copy):
                    self._must(x.op.bucket not in found, (c, pc), "copies a bucket again")
                    self._must(not (x.reads or x.writes), (c, pc), "has slots")
                    found[x.op.bucket] = pc
            if not found and not any(isinstance(node.op, Copy) for node in self.dag.nodes):
                continue
            for pc, x in enumerate(plan.instructions):
                for bucket in (x.op.bucket, *x.buckets) if isinstance(x.op, Update) else ():
                    self._must(bucket in found, (c, pc), f"changes bucket {bucket}, never copied")
                    good = self.clocks[c].sure(found[bucket], pc)
                    self._must(good, (c, pc), f"changes bucket {bucket} before it is copied")

    def check_under_way(self) -> None:
        """At most two sends or reduce-scatters of a stream are in flight; only one at a
        reduce-scatter of a single microbatch's gradients (ZeRO-2, 3). The first instruction that
        needs a communication waits for its end."""
        for c, plan in enumerate(self.plans):
            over = self._over(plan)
            ends = {p: pc for pc, x in enumerate(plan.instructions) for p in x.ends}
            wanted = {p: pc for p, pc in over.items() if pc < len(plan.instructions)}
            self._agree(c, "where communications end", wanted, ends)
            rows: defaultdict[str, list[int]] = defaultdict(list)
            for pc, x in enumerate(plan.instructions):
                scatters = isinstance(x.op, Collective) and x.op.kind is Move.REDUCE_SCATTER
                if x.verb is Verb.SEND or scatters:
                    rows[x.stream].append(pc)
                    early = scatters and self.dag.buckets[x.of].rule.zero > 1
                    if sum(over[p] > pc for p in rows[x.stream]) > (1 if early else 2):
                        raise PlanError(f"{self.say((c, pc))} is one too many under way")

    def _beside(self, c: int, x: Instruction) -> int:
        """Bytes that a communication holds until it ends, beside its slots."""
        kinds = self.plans[c].slots
        if _combines(x) and not _by_count(x):
            return kinds[x.reads[0]].nbytes + self._copy(x)
        if x.content is Content.GRADIENTS:  # the flat bucket, and the gradients to be added
            assert isinstance(x.op, Collective)
            if any(kinds[slot].bucket == x.of for slot in x.reads):
                return 0
            whole = self._whole(x.of, c) * self.dag.buckets[x.of].gradient.itemsize
            if x.op.kind is Move.REDUCE_SCATTER:
                return whole + sum(kinds[slot].nbytes for slot in x.adds)
            return whole if x.adds else 0
        return self._copy(x)

    def _copy(self, x: Instruction) -> int:
        """Bytes of the copy that is sent or received where the tensor itself is not contiguous."""
        if x.content is not Content.VALUE:
            return 0
        node = self.dag.nodes[x.node]
        aside = 0
        if x.verb is Verb.SEND and isinstance(x.op, Transfer) and x.op.counts is not None:
            source, target = x.op.parts
            nbytes, _ = self._lies(node.reads[0], source)
            each = nbytes + nbytes // self._counts(x)  # one more, for rows without an expert
            return _most_shared(target, source) * x.op.replicas[1] * each
        if _dispatches(x) and _runs(x) > 1:
            nbytes, copy = self._lies(node.reads[0], node.parts)
            return copy or nbytes
        if isinstance(x.op, Transfer) and x.op.dim > 0:  # parts that are not contiguous
            ends = x.op.parts
            mine, other = ends if x.verb is Verb.SEND else ends[::-1]
            if mine % other:
                sends = x.verb is Verb.SEND
                nbytes, copy = self._lies(node.reads[0], mine)
                aside = copy or nbytes
                if sends:
                    return aside
        comes = x.verb is Verb.RECV or _combines(x)
        value = (node.writes if comes else node.reads)[0]
        parts = 0
        summed = False
        while value >= self.dag.first_extra:
            extra = self.dag.extra[value - self.dag.first_extra]
            made = self.dag.source(value).op
            summed = summed or isinstance(made, Add)
            if not isinstance(made, Transfer | Add):
                return 0  # assembled from rows
            parts = parts or extra.parts
            value = extra.of
        if self._role(value) not in (Role.ACTIVATION, Role.GRADIENT):
            return aside
        parts = parts or self.dag.source(value).parts
        nbytes, copy = self._lies(value, parts)
        return aside + (0 if summed and copy != nbytes else copy)

    def _lies(self, number: int, parts: int) -> tuple[int, int]:
        """Bytes of an activation or its gradient in its own layout, and of its contiguous copy (0
        if it is contiguous itself)."""
        while number >= self.dag.first_extra:
            number = self.dag.extra[number - self.dag.first_extra].of
        value, _ = self.dag.table.value(number)
        model = self._model(parts)
        facts = model.values[value.of]
        if value.role is Role.GRADIENT:
            chunk = model.chunks[value.by]
            ref = Ref(Kind.INPUT_GRAD, chunk.inputs.index(value.of), value.term)
            stored = dict(chunk.gradients).get(ref)
            if stored is not None:
                return stored.nbytes, stored.copied or 0
        return facts.nbytes, facts.copied or 0

    def _busy(self, c: int, x: Instruction) -> int:
        """Bytes that an instruction needs beside its slots, at the larger of two moments. While a
        pass runs, it needs less if the values that it is the chunk's last pass to read are freed.
        When its program is done, first gradients are copied to where others are added, and values
        that only the backward reads are gone."""
        if x.verb is Verb.SEND and isinstance(x.op, Transfer) and x.op.counts is not None:
            return 24 * (self._counts(x) + 2)
        if _dispatches(x) and _by_count(x) and _runs(x) > 1:
            return self._merging(c, x)
        if not isinstance(x.op, Compute):
            return 0
        kinds = self.plans[c].slots
        model = self._model(len(x.rows.devices) // x.rows.copies)
        facts = model.chunks[x.op.chunk].variants[self.dag.policy(x.op.chunk)].passes[x.op.which]
        slots = [s for ref, s in zip(facts.reads, x.reads, strict=False) if ref in facts.last]
        new = sum(kinds[slot].nbytes for slot in x.adds)
        kept = sum(kinds[slot].nbytes for slot in set(slots).difference(x.frees))
        runs = facts.workspace + new - max(0, facts.eased - kept)
        fresh = 0
        for slot in set(x.writes).difference(x.adds):
            if slot in x.allocates:
                fresh += kinds[slot].nbytes
            elif kinds[slot].lies_in:
                fresh += kinds[slot].nbytes - kinds[slot].own
        if not fresh:
            return runs
        gone = sum(kinds[slot].nbytes for slot in x.frees if kinds[slot].holder is MemoryKind.SAVED)
        return max(runs + facts.housed, fresh + new - gone)

    def _counts(self, x: Instruction) -> int:
        """The number of experts whose counts an instruction sends."""
        return self.dag.model.values[x.of].shape[0]

    def _merging(self, c: int, x: Instruction) -> int:
        """Bytes of the row indices, forward and inverse, and of the workspace to find them."""
        rows = self._model(self.dag.nodes[x.node].parts).values[x.of].shape[0]
        return 29 * rows + 4 * self.plans[c].slots[x.reads[1]].nbytes

    def _model(self, parts: int) -> Model:
        return self.models.get(parts, self.dag.model)

    def _nbytes(self, c: int, content: Any) -> int:
        match content:
            case _Tensor(value=value, form="runs"):
                experts = self._model(content.parts).values[self.dag.table.value(value)[0].of]
                runs = self._sorted_runs(value, content.parts)
                return experts.nbytes // experts.shape[0] * (experts.shape[0] + 1) * runs
            case _Tensor(value=value, form=form) if form != "plain" or content.added:
                nbytes, copy = self._lies(value, content.parts)
                rows = self._rows(value, content.parts) if form != "plain" else None
                if rows is not None:
                    return (copy or nbytes) // rows.own * rows.room
                return copy or nbytes  # assembled from rows, or a sum
            case _Tensor(value=value):
                return self._value_bytes(value, content.parts)
            case _Gradients(nbytes=nbytes):
                return nbytes
            case _OfBucket(kind=Content.PARAMETERS, bucket=bucket):
                found = self.dag.buckets[bucket]
                whole = self._whole(bucket, c) * found.dtype.itemsize
                return whole if self._sharded(bucket) else 0
            case _OfAll(kind=Content.LOSS):
                return 2 * SCALAR
            case _OfAll(kind=Content.LOAD, of=chunk):
                found_rows = self.dag.model.chunks[chunk].sorted_rows
                assert found_rows is not None
                return found_rows.experts * SCALAR
        return SCALAR

    def _value_bytes(self, number: int, parts: int) -> int:
        """Bytes of a value of the model on one of ``parts`` parts."""
        value, _ = self.dag.table.value(number)
        model = self._model(parts)
        if value.role in OF_BACKWARD:
            variant = model.chunks[value.of].variants[self.dag.policy(value.of)]
            return {
                Role.SAVED: variant.saved_bytes,
                Role.SAVED_FOR_BW: variant.saved_for_bw_bytes,
                Role.BI_SAVED: variant.bi_saved_bytes,
            }[value.role]
        if value.role in OF_PARAMETERS:
            names = [p for p in model.chunks[value.of].parameters if self._is_of(number, p)]
            parameters = [model.parameters[p] for p in names]
            sizes = [math.prod(p.shape) * p.gradient.itemsize for p in parameters]
            return sum(sizes) // self._ways(value.of)
        return self._lies(number, parts)[0]

    def _part(self, bucket: int, c: int) -> int:
        """Elements of one device's part, if the bucket's rule shards anything; else of the
        bucket."""
        if not self.dag.buckets[bucket].sliced and self._sharing(bucket, c) > 1:
            return self.dag.buckets[bucket].share  # checked by check_buckets
        count = 0
        for p in self.dag.buckets[bucket].parameters:
            parts = len(self.holding[p].devices)
            count += math.prod(self.dag.model.parameters[p].shape) // parts
        return -(-count // self._sharing(bucket, c))

    def _whole(self, bucket: int, c: int) -> int:
        """Elements of the whole bucket on one device, padded to even parts."""
        return self._part(bucket, c) * self._sharing(bucket, c)

    def _sharing(self, bucket: int, c: int) -> int:
        """How many devices share one copy of a bucket on devices of class ``c``."""
        return self.dag.buckets[bucket].within  # checked by check_buckets

    def _holding(self) -> dict[str, _Holding]:
        found: defaultdict[str, _Holding] = defaultdict(_Holding)
        for node in self.dag.nodes:
            if not isinstance(node.op, Compute):
                continue
            chunk = self.dag.model.chunks[node.op.chunk]
            ways = self._ways(node.op.chunk)
            stride = self.dag.shards[chunk.index].stride if ways > 1 else 1
            for p in chunk.parameters:
                made: list[int] = []
                role = self.lies_in.get((chunk.index, p))
                if role is not None:
                    made = self._made_gradients(
                        chunk.index, node.op.which, node.op.microbatch, role
                    )
                found[p].places.add(node.devices)
                for i, d in enumerate(node.devices):
                    held = found[p]
                    part = i // stride % ways
                    held.devices[part].add(d)
                    held.parts[d].add(part)
                    first = node.devices[i - i % node.replicas]  # replicas count once
                    if made:
                        held.gradients[part].update((v, first) for v in made)
                    self.first_replica.update({(v, d): first for v in made})
        return dict(found)

    def _ways(self, chunk: int) -> int:
        rule = self.dag.shards.get(chunk)
        return rule.ways if rule else 1

    def _form(self, chunk: int, value: int) -> str:
        """The form in which a chunk reads a value. If rows are dispatched: its own output
        uncombined, all other values dispatched."""
        if not self._dispatched(chunk, value):
            return "plain"
        of = self.dag.table.value(value)[0].of
        own = self._role(value) is Role.ACTIVATION and of in self.dag.model.chunks[chunk].outputs
        return "uncombined" if own else "dispatched"

    def _dispatched(self, chunk: int, value: int) -> bool:
        if self._role(value) not in (Role.ACTIVATION, Role.GRADIENT):
            return False
        _, microbatch = self.dag.table.value(value)
        return self._ways(chunk) > 1 or self._merges(chunk, microbatch)

    def _merges(self, chunk: int, microbatch: int) -> bool:
        """Whether the devices that compute a chunk receive several sorted ranges of rows."""
        facts = self.dag.model.chunks[chunk]
        if facts.sorted_rows is None:
            return False
        counts = facts.inputs[facts.sorted_rows.counts]
        for node in self.dag.nodes:
            if isinstance(node.op, Compute) and (node.op.chunk, node.op.microbatch) == (
                chunk,
                microbatch,
            ):
                found = next(
                    v
                    for v in range(self.dag.table.size * microbatch, self.dag.first_extra)
                    if self._role(v) is Role.ACTIVATION and self.dag.table.value(v)[0].of == counts
                )
                return self._sorted_runs(found, node.parts) > 1
        return False

    def _role(self, value: int) -> Role:
        return self.dag.table.value(value)[0].role

    def _sharded(self, bucket: int) -> bool:
        found = self.dag.buckets[bucket]
        return found.rule.zero == 3 and found.within > 1


def _dispatches(x: Instruction) -> bool:
    return isinstance(x.op, Collective) and x.op.dispatches


def _combines(x: Instruction) -> bool:
    return isinstance(x.op, Collective) and x.op.combines


def _by_count(x: Instruction) -> bool:
    return isinstance(x.op, Collective) and x.op.rows is not None


def _runs(x: Instruction) -> int:
    return x.op.runs if isinstance(x.op, Collective) else 1


def _most_shared(parts: int, others: int) -> int:
    """The most of ``parts`` equal parts that overlap one of ``others`` equal parts."""
    return max(
        sum(i * others < (j + 1) * parts and j * parts < (i + 1) * others for i in range(parts))
        for j in range(others)
    )


def _parts(op: object, devices: Group) -> list[tuple[Verb, Group]]:
    match op:
        case Transfer(source=source, target=target):
            return [(Verb.SEND, source), (Verb.RECV, target)]
        case Compute():
            return [(Verb.COMPUTE, devices)]
        case Collective():
            return [(Verb.COLLECTIVE, devices)]
        case Update():
            return [(Verb.UPDATE, devices)]
        case Add():
            return [(Verb.ADD, devices)]
        case Copy():
            return [(Verb.COPY, devices)]
    raise PlanError(f"no instruction does {op}")


def _in_turn(plan: Plan, x: Instruction, brings: Mapping[int, int]) -> bool:
    """Whether a communication is issued before the counts of its rows have arrived: its own stream
    brings them first."""
    if not isinstance(x.op, Collective) or not x.op.in_turn or x.reads[-1] not in brings:
        return False
    return plan.instructions[brings[x.reads[-1]]].stream == x.stream
