"""An independent judge of plans: it runs them, as data, and says what would go wrong.

Enter a lowered DAG and its plans; nothing leaves but a ``PlanError`` that names the place. Shares
no code with ``piper.lower``: it reads plans, the model's facts, and of the lowered DAG what a
worker must know too (what each node is, its parties, buckets and rules). It assumes no more than a
worker promises: a stream runs in order, an instruction starts when its ``waits`` are done, a
communication ends when all its parties have reached it. A free has no stream: only its waits
hold it back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from piper.capture.program import Pass
from piper.ir.dag import Collective, CollectiveKind, Compute, Dag, Group, Transfer, Update
from piper.ir.values import Role
from piper.lower.memory import Memory
from piper.lower.plan import Instruction, Plan, Verb

Clock = dict[str, int]
"""For each stream, the last place that is surely done, and with it all before on that stream."""
At = tuple[int, int]
"""A class and a place in its plan."""

MEETING = (Verb.SEND, Verb.RECV, Verb.COLLECTIVE)
HALVES = (Pass.BI, Pass.BW)


class PlanError(AssertionError):
    """A plan that must not be run."""


def check(dag: Dag, plans: Sequence[Plan], memory: Sequence[Memory] = ()) -> None:
    """Raise a ``PlanError`` unless the plans together do one step of ``dag``, and right."""
    checker = _Checker(dag, plans)
    checker.check_shape()
    checker.check_passes()
    order = checker.run()
    checker.check_slots(order)
    checker.check_contents(order)
    checker.check_order()
    checker.check_state()
    for plan, found in zip(plans, memory, strict=bool(memory)):
        peak, state = _peak(plan), found.parameters + found.optimizer
        if peak != found.peak - state:
            raise PlanError(
                f"plan of {plan.devices}: {peak} bytes at the peak, not {found.peak} - {state}"
            )


def implied_waits(plan: Plan) -> set[tuple[int, int]]:
    """The waits (place, waited for) of a good plan that follow from the rest of it."""
    clocks = _Clocks(plan)
    found = set()
    for place, x in enumerate(plan.instructions):
        for w in x.waits:
            others = tuple(o for o in x.waits if o != w)
            if clocks.before(place, others).get(plan.instructions[w].stream, -1) >= w:
                found.add((place, w))
        clocks.finish(place)
    return found


def _peak(plan: Plan) -> int:
    """The most bytes in slots, instruction by instruction in the order of issue."""
    live = set(plan.given)
    peak = held = sum(plan.slot_bytes[s] for s in live)
    for x in plan.instructions:
        if x.verb is Verb.FREE:
            (slot,) = x.reads
            live.remove(slot)
            held -= plan.slot_bytes[slot]
        for slot in x.writes:
            if slot not in live:
                live.add(slot)
                held += plan.slot_bytes[slot]
        peak = max(peak, held)
    return peak


class _Clocks:
    """What is surely done before each instruction of one plan starts."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ends: dict[int, Clock] = {}
        self.starts: dict[int, Clock] = {}
        self.previous: dict[int, int] = {}
        last: dict[str, int] = {}
        for place, x in enumerate(plan.instructions):
            if x.verb is not Verb.FREE:
                if x.stream in last:
                    self.previous[place] = last[x.stream]
                last[x.stream] = place

    def before(self, place: int, waits: Iterable[int]) -> Clock:
        clock: Clock = {}
        sources = [*waits]
        if place in self.previous:
            sources.append(self.previous[place])
        for source in sources:
            for stream, done in self.ends[source].items():
                if clock.get(stream, -1) < done:
                    clock[stream] = done
        return clock

    def finish(self, place: int) -> None:
        x = self.plan.instructions[place]
        self.starts[place] = self.before(place, x.waits)
        self.ends[place] = dict(self.starts[place])
        if x.verb is not Verb.FREE:
            self.ends[place][x.stream] = place

    def sure(self, before: int, place: int) -> bool:
        """Whether ``before`` is surely done when ``place`` starts."""
        x = self.plan.instructions[before]
        return self.starts[place].get(x.stream, -1) >= before


@dataclass(frozen=True)
class _Tensor:
    """A value of the model: on which group, and how it lies there."""

    value: int
    group: Group
    form: str = "plain"


@dataclass
class _Gradients:
    """A sum of gradients. For each device: whose gradient of what, how many times."""

    parts: dict[int, Counter[tuple[int, int]]]
    scattered: bool = False

    def plus(self, other: _Gradients) -> _Gradients:
        parts = {d: self.parts[d] + other.parts[d] for d in self.parts}
        return _Gradients(parts, self.scattered or other.scattered)


@dataclass(frozen=True)
class _OfBucket:
    what: str
    bucket: int
    scattered: bool = False


@dataclass
class _Holding:
    """Who holds a parameter, and whose gradients belong to it; by part (0 if not divided)."""

    devices: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    gradients: dict[int, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    parts: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


class _Checker:
    def __init__(self, dag: Dag, plans: Sequence[Plan]) -> None:
        self.dag = dag
        self.plans = plans
        self.class_of: dict[int, int] = {}
        for c, plan in enumerate(plans):
            for device in plan.devices:
                if device in self.class_of:
                    raise PlanError(f"device {device} has two plans")
                self.class_of[device] = c
        self.clocks = [_Clocks(plan) for plan in plans]
        self.bucket_of = {p: i for i, b in enumerate(dag.buckets) for p in b.parameters}
        self.holding = self._holding()

    def say(self, at: At) -> str:
        x = self.plans[at[0]].instructions[at[1]]
        name = f"free s{x.reads[0]}" if x.verb is Verb.FREE else f"{x.verb.value} {x.name}"
        return f"{at[1]} {name} of devices {self.plans[at[0]].devices}"

    def get(self, at: At) -> Instruction:
        return self.plans[at[0]].instructions[at[1]]

    # who does what

    def check_shape(self) -> None:
        """Every node is in the plans of its devices, once, and nothing else is."""
        wanted: Counter[tuple[int, int, Verb]] = Counter()
        for number, node in enumerate(self.dag.nodes):
            for verb, devices in _parts(node.op, node.devices):
                for c in self._classes(devices, number):
                    wanted[c, number, verb] += 1
        found: Counter[tuple[int, int, Verb]] = Counter()
        for c, plan in enumerate(self.plans):
            for place, x in enumerate(plan.instructions):
                if x.verb is not Verb.FREE:
                    found[c, x.node, x.verb] += 1
                for w in x.waits:
                    if not 0 <= w < len(plan.instructions) or w == place:
                        raise PlanError(f"{self.say((c, place))} waits for {w}, which is nothing")
                if set(x.adds) - set(x.writes):
                    raise PlanError(f"{self.say((c, place))} adds to what it does not write")
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
        """Every chunk has its passes for every microbatch, once."""
        found: defaultdict[tuple[int, int], list[Pass]] = defaultdict(list)
        for node in self.dag.nodes:
            if isinstance(node.op, Compute):
                found[node.op.chunk, node.op.microbatch].append(node.op.which)
        for chunk in self.dag.model.chunks:
            facts = chunk.variants[self.dag.policy(chunk.index)].passes
            whole = [p for p in (Pass.F, Pass.B) if p in facts]
            halves = [Pass.F, *(p for p in HALVES if p in facts)]
            for microbatch in range(self._microbatches()):
                passes = found[chunk.index, microbatch]
                if sorted(p.value for p in passes) not in (
                    sorted(p.value for p in whole),
                    sorted(p.value for p in halves),
                ):
                    raise PlanError(f"chunk {chunk.index} MB[{microbatch}] has passes {passes}")

    def _microbatches(self) -> int:
        return self.dag.microbatches[1] if self.dag.microbatches else 1

    # when

    def run(self) -> list[list[At]]:
        """What is done together, in one order in which everything can be done."""
        queues: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        frees: list[At] = []
        for c, plan in enumerate(self.plans):
            for place, x in enumerate(plan.instructions):
                if x.verb is Verb.FREE:
                    frees.append((c, place))
                else:
                    queues[c, x.stream].append(place)
        heads = dict.fromkeys(queues, 0)
        done: list[set[int]] = [set() for _ in self.plans]
        there: defaultdict[int, list[At]] = defaultdict(list)
        parties = Counter(
            x.node for plan in self.plans for x in plan.instructions if x.verb in MEETING
        )
        reached: set[At] = set()
        order: list[list[At]] = []

        def finish(together: list[At]) -> None:
            for c, place in together:
                done[c].add(place)
                self.clocks[c].finish(place)
                if (c, self.get((c, place)).stream) in heads:
                    heads[c, self.get((c, place)).stream] += 1
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
                    if x.verb not in MEETING:
                        finish([at])
                        continue
                    reached.add(at)
                    there[x.node].append(at)
                    if len(there[x.node]) == parties[x.node]:
                        finish(there[x.node])
        stuck = [
            self._why(k, queues[k][heads[k]], done) for k in queues if heads[k] < len(queues[k])
        ]
        if stuck:
            raise PlanError("deadlock:\n" + "\n".join(stuck))
        for c, place in frees:
            if not done[c].issuperset(self.get((c, place)).waits):
                raise PlanError(f"{self.say((c, place))} waits for a free")
            self.clocks[c].finish(place)
            order.append([(c, place)])
        return order

    def _why(self, key: tuple[int, str], place: int, done: list[set[int]]) -> str:
        at = (key[0], place)
        waits = [w for w in self.get(at).waits if w not in done[key[0]]]
        if waits:
            return f"  {self.say(at)} waits for {', '.join(self.say((key[0], w)) for w in waits)}"
        node = self.get(at).node
        others = [
            self.say((c, p))
            for c, plan in enumerate(self.plans)
            for p, x in enumerate(plan.instructions)
            if x.node == node and x.verb in MEETING and (c, p) != at
        ]
        return f"  {self.say(at)} meets {', '.join(others)}"

    def check_order(self) -> None:
        """What the strategy orders is ordered on every device that does both."""
        for c, plan in enumerate(self.plans):
            at = {x.node: i for i, x in enumerate(plan.instructions) if x.verb is not Verb.FREE}
            for number, place in at.items():
                for before in self.dag.nodes[number].after:
                    if before in at and not self.clocks[c].sure(at[before], place):
                        raise PlanError(
                            f"{self.say((c, place))} does not wait for {self.say((c, at[before]))}"
                        )

    # slots

    def check_slots(self, order: list[list[At]]) -> None:
        """No access to a slot races with a write of it; every slot is freed once, after all."""
        for c, plan in enumerate(self.plans):
            writer: dict[int, int | None] = dict.fromkeys(plan.given)
            readers: defaultdict[int, list[int]] = defaultdict(list)
            freed: set[int] = set()
            for place in [p for together in order for k, p in together if k == c]:
                x = plan.instructions[place]
                name = self.say((c, place))
                for slot in (*x.reads, *x.writes):
                    if slot in freed:
                        raise PlanError(f"{name} touches s{slot}, which is freed")
                for slot in (*x.reads, *x.adds):
                    if slot not in writer:
                        raise PlanError(f"{name} reads s{slot}, which nothing wrote")
                if x.verb is Verb.FREE:
                    for slot in x.reads:
                        self._must_follow(c, place, [writer[slot], *readers[slot]], slot)
                        freed.add(slot)
                    continue
                for slot in x.reads:
                    self._must_follow(c, place, [writer[slot]], slot)
                    readers[slot].append(place)
                for slot in x.writes:
                    if slot in writer and slot not in x.adds:
                        raise PlanError(f"{name} writes s{slot}, which is live")
                    before = [r for r in readers.pop(slot, []) if r != place]
                    self._must_follow(c, place, [writer.get(slot), *before], slot)
                    writer[slot] = place
            leaks = set(writer) - freed
            if leaks:
                raise PlanError(f"plan of {plan.devices} never frees {sorted(leaks)}")

    def _must_follow(self, c: int, place: int, before: Iterable[int | None], slot: int) -> None:
        for b in before:
            if b is not None and not self.clocks[c].sure(b, place):
                raise PlanError(
                    f"{self.say((c, place))} does not wait for {self.say((c, b))}, "
                    f"which uses s{slot} too"
                )

    # contents

    def check_contents(self, order: list[list[At]]) -> None:
        """Every instruction reads what it is meant to; gradients arrive whole and once."""
        self.slots: list[dict[int, Any]] = [{} for _ in self.plans]
        self.batch: list[dict[int, int]] = [{} for _ in self.plans]
        self.updates: Counter[tuple[str, int]] = Counter()
        self.update_at: dict[tuple[int, int], int] = {}
        self.due: set[tuple[int, int]] = set()
        """Classes and buckets whose updated parts are not gathered yet."""
        self.uses: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        """For each class and bucket, the instructions that read its parameters."""
        for c, plan in enumerate(self.plans):
            self.slots[c] = dict.fromkeys(plan.given, "given")
        for together in order:
            x = self.get(together[0])
            if x.verb is Verb.COMPUTE:
                self._compute(together[0])
            elif x.verb is Verb.UPDATE:
                self._update(together[0])
            elif x.verb is Verb.COLLECTIVE:
                self._collective(together)
            elif x.verb in (Verb.SEND, Verb.RECV):
                self._transfer(together)

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
        reads = tuple(v for v in reads if self._role(v) is not Role.SEED)
        used: set[int] = set()
        if chunk.variants[policy].passes[op.which].uses_parameters:
            used = {self.bucket_of[p] for p in chunk.parameters}
        divided = {b for b in used if self._divided(b)}
        self._must(len(x.reads) == len(reads) + len(divided), at, "reads the wrong number of slots")
        for value, slot in zip(reads, x.reads, strict=False):
            content = self.slots[c][slot]
            if self._role(value) is Role.BATCH:
                self._must(content == "given", at, f"wants the batch, but s{slot} holds {content}")
                known = self.batch[c].setdefault(slot, value)
                self._must(known == value, at, f"takes s{slot} for two tensors of the batch")
            else:
                form = "exchanged" if self._exchanged(op.chunk, value) else "plain"
                wanted = _Tensor(value, node.devices, form)
                self._must(content == wanted, at, f"wants {wanted}, s{slot} holds {content}")
        whole = [self.slots[c][slot] for slot in x.reads[len(reads) :]]
        expected = {_OfBucket("gathered", b) for b in divided}
        self._must(set(whole) == expected, at, f"wants {expected}, reads {whole}")
        for bucket in used - divided:
            self.uses[c, bucket].append(at[1])
        self._must(len(x.writes) == len(writes), at, "writes the wrong number of slots")
        for value, slot in zip(writes, x.writes, strict=True):
            new: Any
            if self._role(value) is Role.PARAMETER_GRADIENT:
                new = _Gradients({d: Counter([(value, d)]) for d in self.plans[c].devices})
            else:
                form = "partial" if self._exchanged(op.chunk, value) else "plain"
                new = _Tensor(value, node.devices, form)
            self._write(at, slot, new)

    def _write(self, at: At, slot: int, new: Any) -> None:
        if slot in self.get(at).adds:
            old = self.slots[at[0]][slot]
            good = isinstance(old, _Gradients) and isinstance(new, _Gradients)
            self._must(good, at, f"adds {new} to {old}")
            new = old.plus(new)
        self.slots[at[0]][slot] = new

    def _transfer(self, together: list[At]) -> None:
        op = self.dag.nodes[self.get(together[0]).node].op
        assert isinstance(op, Transfer)
        sent = set()
        for at in together:
            if self.get(at).verb is Verb.SEND:
                (slot,) = self.get(at).reads
                content = self.slots[at[0]][slot]
                self._must(isinstance(content, _Tensor), at, f"sends {content}")
                good = content.group == op.source and content.form == "plain"
                self._must(good, at, f"sends {content}")
                sent.add(content.value)
        self._must(len(sent) == 1, together[0], f"sends several values: {sent}")
        for at in together:
            if self.get(at).verb is Verb.RECV:
                (slot,) = self.get(at).writes
                self._write(at, slot, _Tensor(next(iter(sent)), op.target))

    def _collective(self, together: list[At]) -> None:
        op = self.dag.nodes[self.get(together[0]).node].op
        assert isinstance(op, Collective)
        members = [d for group in op.groups for d in group]
        present = [d for c, _ in together for d in self.plans[c].devices]
        self._must(sorted(members) == sorted(present), together[0], "is not done by its groups")
        if op.kind is CollectiveKind.ALL_TO_ALL:
            for at in together:
                self._exchange(at, op)
        elif op.kind is CollectiveKind.ALL_GATHER:
            for at in together:
                self._gather(at, op)
        else:
            self._reduce(together, op)

    def _exchange(self, at: At, op: Collective) -> None:
        (slot,), (target,) = self.get(at).reads, self.get(at).writes
        content = self.slots[at[0]][slot]
        self._must(isinstance(content, _Tensor), at, f"exchanges {content}")
        flat = tuple(d for group in op.groups for d in group)
        good = flat == content.group and content.form in ("plain", "partial")
        self._must(good, at, f"exchanges {content}")
        form = "exchanged" if content.form == "plain" else "plain"
        self._write(at, target, _Tensor(content.value, content.group, form))

    def _gather(self, at: At, op: Collective) -> None:
        c, x = at[0], self.get(at)
        (target,) = x.writes
        if x.reads:
            content = self.slots[c][x.reads[0]]
            good = isinstance(content, _OfBucket) and content.what == "updated"
            self._must(good and content.scattered, at, f"gathers {content}")
            bucket = content.bucket
            self._must((c, bucket) in self.due, at, f"gathers bucket {bucket} again")
            self.due.remove((c, bucket))
        else:
            (value,) = self.dag.nodes[x.node].writes
            bucket = self.dag.extra[value - self.dag.first_extra].of
            self._must(self._divided(bucket), at, "gathers what is whole")
            self.uses[c, bucket].append(at[1])
        self._over_holders(at, op, bucket)
        self._write(at, target, _OfBucket("gathered", bucket))

    def _over_holders(self, at: At, op: Collective, bucket: int) -> None:
        """The groups of ``op`` are exactly those who hold equal parts of the bucket."""
        groups = sorted(sorted(group) for group in op.groups)
        for p in self.dag.buckets[bucket].parameters:
            held = sorted(sorted(devices) for devices in self.holding[p].devices.values())
            self._must(groups == held, at, f"is over {groups}, but {p} is held by {held}")

    def _reduce(self, together: list[At], op: Collective) -> None:
        local: dict[int, Counter[tuple[int, int]]] = {}
        for at in together:
            c = at[0]
            for slot in self.get(at).reads:
                content = self.slots[c][slot]
                good = isinstance(content, _Gradients) and not content.scattered
                self._must(good, at, f"reduces {content}")
                for d, part in content.parts.items():
                    self._must(all(owner == d for _, owner in part), at, "reduces twice")
                    local[d] = local.get(d, Counter()) + part
        total: dict[int, Counter[tuple[int, int]]] = {}
        for group in op.groups:
            summed: Counter[tuple[int, int]] = Counter()
            for d in group:
                summed += local.get(d, Counter())
            total.update(dict.fromkeys(group, summed))
        scattered = op.kind is CollectiveKind.REDUCE_SCATTER
        for at in together:
            (target,) = self.get(at).writes
            parts = {d: total[d] for d in self.plans[at[0]].devices}
            self._write(at, target, _Gradients(parts, scattered))
        # over whom is judged by what arrives: see _update

    def _update(self, at: At) -> None:
        c, x = at[0], self.get(at)
        op = self.dag.nodes[x.node].op
        assert isinstance(op, Update)
        bucket = self.dag.buckets[op.bucket]
        contents = [self.slots[c][slot] for slot in x.reads]
        self._must(all(isinstance(g, _Gradients) for g in contents), at, f"reads {contents}")
        scattered = {g.scattered for g in contents}
        self._must(len(scattered) == 1, at, "reads whole and divided gradients")
        for d in self.plans[c].devices:
            found: Counter[tuple[int, int]] = sum((g.parts[d] for g in contents), Counter())
            for p in bucket.parameters:
                if self.dag.model.parameters[p].trained:
                    self._check_sum(at, d, p, found)
                    self.updates[p, d] += 1
        self.update_at[c, op.bucket] = at[1]
        if scattered == {True} and bucket.rule.zero < 3:
            self.due.add((c, op.bucket))
        (target,) = x.writes
        self._write(at, target, _OfBucket("updated", op.bucket, scattered == {True}))

    def _check_sum(self, at: At, d: int, p: str, found: Counter[tuple[int, int]]) -> None:
        held = self.holding[p]
        self._must(len(held.parts[d]) == 1, at, f"has parts {held.parts[d]} of {p} on {d}")
        wanted = held.gradients[next(iter(held.parts[d]))]
        users = {c.index for c in self.dag.model.chunks if p in c.parameters}
        mine = {g: n for g, n in found.items() if self.dag.table.value(g[0])[0].of in users}
        if mine != dict.fromkeys(wanted, 1):
            missing = [self._gradient(g) for g in sorted(wanted - set(mine))]
            wrong = [f"{n} x {self._gradient(g)}" for g, n in mine.items() if g not in wanted]
            many = [f"{n} x {self._gradient(g)}" for g, n in mine.items() if g in wanted and n > 1]
            raise PlanError(
                f"{self.say(at)}: gradient of {p} on {d}: missing {missing}, wrong {wrong}, "
                f"too often {many}"
            )

    def _gradient(self, gradient: tuple[int, int]) -> str:
        value, microbatch = self.dag.table.value(gradient[0])
        return f"dw{value.of}.{microbatch}@{gradient[1]}"

    # state

    def check_state(self) -> None:
        """Every trained parameter is updated once by each holder, after all its uses."""
        if self.due:
            raise PlanError(f"updated parts are not gathered: {sorted(self.due)}")
        for p, held in self.holding.items():
            if not held.gradients:
                continue
            for d in held.parts:
                if self.updates[p, d] != 1:
                    raise PlanError(f"{p} is updated {self.updates[p, d]} times on device {d}")
        for (c, bucket), places in self.uses.items():
            update = self.update_at.get((c, bucket))
            for place in places if update is not None else ():
                if not self.clocks[c].sure(place, update) and place not in self._causes(
                    (c, update)
                ):
                    raise PlanError(
                        f"{self.say((c, update))} does not wait for {self.say((c, place))}, "
                        "which uses its parameters"
                    )

    def _causes(self, at: At) -> set[int]:
        """The instructions of the same class without which ``at`` cannot start: what was sent to
        others may come back as what it needs."""
        sends: defaultdict[int, list[At]] = defaultdict(list)
        for c, plan in enumerate(self.plans):
            for place, x in enumerate(plan.instructions):
                if x.verb in (Verb.SEND, Verb.COLLECTIVE):
                    sends[x.node].append((c, place))
        seen = {at}
        left = [at]
        while left:
            c, place = left.pop()
            x = self.get((c, place))
            before = [(c, w) for w in x.waits]
            if place in self.clocks[c].previous:
                before.append((c, self.clocks[c].previous[place]))
            if x.verb in (Verb.RECV, Verb.COLLECTIVE) and (c, place) != at:
                before += sends[x.node]
            left += [b for b in before if b not in seen]
            seen.update(before)
        return {place for c, place in seen if c == at[0]}

    def _holding(self) -> dict[str, _Holding]:
        found: defaultdict[str, _Holding] = defaultdict(_Holding)
        for node in self.dag.nodes:
            if not isinstance(node.op, Compute):
                continue
            chunk = self.dag.model.chunks[node.op.chunk]
            ways = self._ways(node.op.chunk)
            _, writes = self.dag.table.wire(
                chunk.index, node.op.which, self.dag.policy(chunk.index), node.op.microbatch
            )
            made = [v for v in writes if self._role(v) is Role.PARAMETER_GRADIENT]
            for p in chunk.parameters:
                trained = self.dag.model.parameters[p].trained
                for i, d in enumerate(node.devices):
                    held = found[p]
                    held.devices[i % ways].add(d)
                    held.parts[d].add(i % ways)
                    if trained:
                        held.gradients[i % ways].update((v, d) for v in made)
        return dict(found)

    def _ways(self, chunk: int) -> int:
        rule = self.dag.shards.get(chunk)
        return rule.ways if rule else 1

    def _exchanged(self, chunk: int, value: int) -> bool:
        moves = self._role(value) in (Role.ACTIVATION, Role.GRADIENT)
        return moves and self._ways(chunk) > 1

    def _role(self, value: int) -> Role:
        return self.dag.table.value(value)[0].role

    def _divided(self, bucket: int) -> bool:
        found = self.dag.buckets[bucket]
        held = self.holding[found.parameters[0]]
        return found.rule.zero == 3 and any(len(devices) > 1 for devices in held.devices.values())


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
    raise PlanError(f"no instruction does {op}")
