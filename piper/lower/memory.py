"""What a plan holds at every moment: state that stays, slots from when they are written until they
are freed, and what an instruction needs only while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from piper.ir.dag import Compute, Dag, Transfer, Update
from piper.ir.facts import PassFacts
from piper.ir.overlaps import scattered
from piper.ir.text import group_text
from piper.ir.values import ExtraRole, Role
from piper.lower.accumulation import adds_up_in_place, gradient_names, padded
from piper.lower.plan import COMMUNICATING, Instruction, Plan, Verb, completed, freed, updated
from piper.lower.sizes import Sizes
from piper.units import bytes_text


class Holder(Enum):
    """What memory is held by."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    BUFFERS = "buffers"
    """Buffers of the model, and constants of its code."""
    GRADIENTS = "gradients"
    """Of parameters, whole or reduced."""
    SAVED = "saved activations"
    """Kept from a forward for its backward, and from BI for BW."""
    ACTIVATIONS = "activations"
    """What flows between chunks, their gradients included."""
    BATCH = "batch"
    COMMUNICATION = "communication"
    """What was received, exchanged or gathered."""
    WORKSPACE = "workspace"
    """What one instruction needs while it runs."""

    __hash__ = object.__hash__  # Enum's own is slow


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one class of devices, in bytes."""

    devices: tuple[int, ...]
    parameters: int
    optimizer: int
    peak: int
    """The most that is held at one time, state included."""
    peak_at: int
    """The instruction during which it is held."""
    at_peak: Mapping[Holder, int]
    """The peak, by what holds it."""
    over_time: tuple[int, ...]
    """Bytes held after each instruction, state included."""

    def __str__(self) -> str:
        parts = ", ".join(f"{h.value} {bytes_text(n)}" for h, n in self.at_peak.items() if n)
        return f"devices {group_text(self.devices)}: peak {bytes_text(self.peak)} ({parts})"


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """What an optimizer takes, in bytes for each byte that it updates."""

    state: float = 2.0
    """Kept between steps: 2 for Adam."""
    update: float = 0.0
    """Needed while it updates a parameter."""
    together: bool = False
    """Whether it needs that for all parameters at once, and not one after another."""
    scalars: int = 0
    """Bytes kept for each parameter, whatever its size."""
    whole: bool = False
    """Whether its step is about all parameters of a device, and not about one bucket after
    another: then the last update waits for all gradients, and takes the step."""


def memory_of(
    dag: Dag, plan: Plan, sizes: Sizes, optimizer: OptimizerCost, *, apart: bool = False
) -> Memory:
    """The memory of ``plan``: an upper bound that nothing but chance keeps a run below. If streams
    run ``apart``, what a communication reads stays until it is over."""
    mine = plan.devices[0]
    buckets = [
        i for i, bucket in enumerate(dag.buckets) if any(mine in group for group in bucket.groups)
    ]
    parameters = sum(sizes.state(i) for i in buckets)
    kept = sum(_optimizer(dag, sizes, i, optimizer) for i in buckets)
    holders = holders_of_slots(dag, plan)
    size = plan.slot_bytes
    book = _Book(
        {
            Holder.PARAMETERS: parameters,
            Holder.OPTIMIZER: kept,
            Holder.BUFFERS: _buffers(dag, plan),
        }
    )
    for given in plan.given:
        book.add(Holder.BATCH, size[given.slot])
    book.look(-1)
    over_time = []
    way = _UnderWay(plan, apart=apart)
    sums = _Sums(dag, plan, sizes)
    moved = {x.reads[0] for x in plan.instructions if _in_place(x)}
    frees = freed(plan)
    stepped = updated(plan, whole=optimizer.whole)
    for place, x in enumerate(plan.instructions):
        for other in way.ends[place]:
            book.look(place, _unpacked(plan.instructions[other], size))
            for holder, nbytes in way.end(other):
                book.add(holder, -nbytes)
        if x.verb is Verb.FREE:
            slot = x.reads[0]
            own = size[slot] - sums.within(slot) + sums.padding(slot)
            if slot not in moved and not way.keeps(slot, holders[slot], own):
                book.add(holders[slot], -own)
        else:
            for slot in x.writes:
                if slot not in x.adds and not _in_place(x) and not sums.becomes(x):
                    own = size[slot] - sums.within(slot) + sums.padding(slot)
                    book.add(holders[slot], own)
                    book.add(Holder.GRADIENTS, sums.begun(slot))
            if x.verb in COMMUNICATING:
                beside = _beside(dag, sizes, x, size)
                book.add(Holder.GRADIENTS, -sums.taken(x))
                book.add(Holder.COMMUNICATION, beside)
                way.begin(place, x, beside, copies=_copied(dag, sizes, x) > 0)
            steps = [u.op.bucket for u in stepped.get(place, ()) if isinstance(u.op, Update)]
            workspace = _workspace(dag, sizes, x, frees[place], size, optimizer, steps)
            if copied := sums.copied(x):  # when the program is done with what it alone reads
                gone = sum(size[slot] for slot in frees[place] if holders[slot] is Holder.SAVED)
                workspace += _housed(dag, sizes, x)
                workspace = max(workspace, _added(x, size) + copied - gone)
            book.look(place, workspace)
        over_time.append(book.total)
    found = {holder: book.at_peak.get(holder, 0) for holder in Holder}
    return Memory(plan.devices, parameters, kept, book.peak, book.at, found, tuple(over_time))


def _optimizer(dag: Dag, sizes: Sizes, bucket: int, cost: OptimizerCost) -> int:
    found = dag.buckets[bucket]
    scalars = cost.scalars * len(found.parameters) if found.trained else 0
    return sizes.optimizer(bucket, cost.state) + scalars


def _buffers(dag: Dag, plan: Plan) -> int:
    """Bytes of what the passes of a plan read that is no parameter and no value."""
    chunks = {x.op.chunk for x in plan.instructions if isinstance(x.op, Compute)}
    names = {name for chunk in chunks for name in dag.model.chunks[chunk].buffers}
    return sum(dag.model.buffers.get(name, 0) for name in names)


class _Book:
    """Bytes by what holds them, and the moment at which they were most."""

    def __init__(self, held: Mapping[Holder, int]) -> None:
        self.held = {**dict.fromkeys(Holder, 0), **held}
        self.total = sum(held.values())
        self.peak, self.at = -1, -1
        self.at_peak: Mapping[Holder, int] = {}

    def add(self, holder: Holder, nbytes: int) -> None:
        self.held[holder] += nbytes
        self.total += nbytes

    def look(self, place: int, workspace: int = 0) -> None:
        """Note what is held now, with ``workspace`` bytes more."""
        if self.total + workspace > self.peak:
            self.peak, self.at = self.total + workspace, place
            self.at_peak = {**self.held, Holder.WORKSPACE: workspace}


class _Sums:
    """Gradients that are added up where they are reduced: of a bucket whose gradients are not
    divided between passes, all lie in one buffer, from the first one on; and those that a device
    adds up for itself."""

    def __init__(self, dag: Dag, plan: Plan, sizes: Sizes) -> None:
        self._sizes = sizes
        self._buckets = dag.buckets
        names = gradient_names(dag, plan)
        self._parts: dict[int, dict[int, int]] = {}
        self._whole: dict[int, int] = {}
        for x in plan.instructions:
            if x.role is not ExtraRole.REDUCED or not adds_up_in_place(
                dag.buckets[x.of], [names[slot] for slot in x.reads]
            ):
                continue
            bucket = dag.buckets[x.of]
            self._whole[x.of] = sizes.whole(x.of) * bucket.gradient.itemsize
            for slot in x.reads:
                mine = set(names[slot]).intersection(bucket.parameters)
                elements = sum(math.prod(dag.model.parameters[name].shape) for name in mine)
                nbytes = elements // bucket.ways * bucket.gradient.itemsize
                self._parts.setdefault(slot, {})[x.of] = nbytes
        self._open: set[int] = set()
        growing = {slot for x in plan.instructions for slot in x.adds}
        alone = [s for s in names if s in growing and s not in self._parts]
        self._alone = {s: plan.slot_bytes[s] for s in alone}
        ways = {
            slot: dag.shards[x.op.chunk].ways
            for x in plan.instructions
            if isinstance(x.op, Compute) and x.op.chunk in dag.shards
            for slot in x.writes
        }
        self._padding = {s: _padding(dag, names[s], ways.get(s, 1)) for s in alone}

    def within(self, slot: int) -> int:
        """Bytes of a slot that lie in such buffers."""
        return sum(self._parts.get(slot, {}).values())

    def padding(self, slot: int) -> int:
        """Bytes between the gradients of a slot, each of which begins at a line of its own."""
        return self._padding.get(slot, 0)

    def begun(self, slot: int) -> int:
        """Bytes of the buffers that the first gradients in ``slot`` make necessary."""
        new = self._parts.get(slot, {}).keys() - self._open
        self._open |= new
        return sum(self._whole[bucket] for bucket in new)

    def becomes(self, x: Instruction) -> bool:
        """Whether the buffer itself becomes the result of a reduction."""
        return x.of in self._whole and x.role is ExtraRole.REDUCED and not self._scatters(x)

    def taken(self, x: Instruction) -> int:
        """Bytes of the buffer that a reduction scatters."""
        scattered = x.of in self._whole and x.role is ExtraRole.REDUCED and self._scatters(x)
        return self._whole[x.of] if scattered else 0

    def copied(self, x: Instruction) -> int:
        """Bytes of first gradients before they are copied to where others are added to them."""
        first = [slot for slot in x.writes if slot not in x.adds]
        return sum(self.within(slot) + self._alone.get(slot, 0) for slot in first)

    def _scatters(self, x: Instruction) -> bool:
        return self._sizes.divided(x.of)


def _padding(dag: Dag, names: tuple[str, ...], ways: int) -> int:
    """Bytes between gradients that lie side by side."""
    total = 0
    for name in names:
        parameter = dag.model.parameters[name]
        nbytes = math.prod(parameter.shape) // ways * parameter.gradient.itemsize
        total += padded(nbytes) - nbytes
    return total


class _UnderWay:
    """Communications that have begun and hold memory until they are over."""

    def __init__(self, plan: Plan, *, apart: bool) -> None:
        self.ends = completed(plan)
        self._apart = apart
        self._over = {other: place for place, row in enumerate(self.ends) for other in row}
        self._held: dict[int, list[tuple[Holder, int]]] = {}
        self._sends: dict[int, list[int]] = {}

    def begin(self, place: int, x: Instruction, beside: int, *, copies: bool) -> None:
        """``copies`` says that not what is read goes out, but a contiguous copy of it."""
        self._held[place] = [(Holder.COMMUNICATION, beside)]
        sends = (x.verb is Verb.SEND or x.role is ExtraRole.EXCHANGED) and not copies
        if sends or self._apart:
            for slot in x.reads:
                self._sends.setdefault(slot, []).append(place)

    def keeps(self, slot: int, holder: Holder, nbytes: int) -> bool:
        """Whether what is freed lives on until it is sent."""
        senders = [place for place in self._sends.pop(slot, ()) if place in self._held]
        if senders:
            last = max(senders, key=lambda place: self._over.get(place, len(self.ends)))
            self._held[last].append((holder, nbytes))
        return bool(senders)

    def end(self, place: int) -> list[tuple[Holder, int]]:
        return self._held.pop(place)


def _beside(dag: Dag, sizes: Sizes, x: Instruction, size: tuple[int, ...]) -> int:
    """Bytes that a communication holds until it is over, beside what it reads and writes."""
    if x.role is ExtraRole.REDUCED:
        # all that is reduced lies in one buffer: of a sum for everyone that is the result itself
        whole = sizes.whole(x.of) * dag.buckets[x.of].gradient.itemsize
        if not sizes.divided(x.of):
            return whole if x.adds else whole - size[x.writes[0]]
        return whole + sum(size[slot] for slot in x.adds)
    if x.role is ExtraRole.PARTIAL:  # its rows in another order
        return size[x.reads[0]] + _copied(dag, sizes, x)
    return _copied(dag, sizes, x)


def _copied(dag: Dag, sizes: Sizes, x: Instruction) -> int:
    """Bytes of the contiguous copy that messages carry of what lies otherwise: expanded,
    transposed, or in several parts."""
    node = dag.nodes[x.node]
    if isinstance(x.op, Transfer) and scattered(x.op, sends=x.verb is Verb.SEND):
        if x.verb is Verb.SEND:
            return sizes.sent(node.reads[0])
        return sizes.sent(node.writes[0]) + sizes.copied(node.writes[0])
    if x.verb is Verb.RECV or x.role is ExtraRole.PARTIAL:
        return sizes.copied(node.writes[0])
    if x.verb is Verb.SEND or x.role is ExtraRole.EXCHANGED:
        return sizes.copied(node.reads[0])
    return 0


def _in_place(x: Instruction) -> bool:
    """Whether what is read becomes what is written."""
    return x.role is ExtraRole.SUMMED and bool(x.reads)


def _unpacked(x: Instruction, size: tuple[int, ...]) -> int:
    """Bytes that a communication needs beside when it is over, to put what came in order."""
    return size[x.writes[0]] if x.role is ExtraRole.EXCHANGED else 0


def _workspace(
    dag: Dag,
    sizes: Sizes,
    x: Instruction,
    freed: list[int],
    size: tuple[int, ...],
    optimizer: OptimizerCost,
    steps: Sequence[int],
) -> int:
    """Bytes that an instruction needs while it runs beside what it reads and writes; ``freed`` are
    the slots that nobody needs after it, ``steps`` the buckets that the optimizer updates in it."""
    if isinstance(x.op, Compute):
        facts = sizes.facts(x.op, dag.nodes[x.node].parts)
        eased = facts.eased if _reads_last(dag, x, facts, freed) else 0
        return facts.workspace - eased + _added(x, size)
    if isinstance(x.op, Update):
        each = [
            sizes.updating(bucket, optimizer.update, together=optimizer.together)
            for bucket in steps
        ]
        return sum(each) if optimizer.together else max(each, default=0)
    return 0


def _housed(dag: Dag, sizes: Sizes, x: Instruction) -> int:
    """Bytes more that a pass needs where the memory of its gradients is there first."""
    if not isinstance(x.op, Compute):
        return 0
    return sizes.facts(x.op, dag.nodes[x.node].parts).housed


def _reads_last(dag: Dag, x: Instruction, facts: PassFacts, freed: list[int]) -> bool:
    """Whether nobody else on the device needs what no later pass of the chunk does."""
    slots = iter(x.reads)
    for ref, value in zip(facts.reads, dag.nodes[x.node].reads, strict=False):
        if value < dag.first_extra and dag.table.value(value)[0].role is Role.SEED:
            continue
        if next(slots) not in freed and ref in facts.last:
            return False
    return True


def _added(x: Instruction, size: tuple[int, ...]) -> int:
    """Bytes of what is made first, and then added to a slot."""
    return sum(size[slot] for slot in x.adds)


_BY_ROLE = {
    Role.BATCH: Holder.BATCH,
    Role.SEED: Holder.BATCH,
    Role.ACTIVATION: Holder.ACTIVATIONS,
    Role.GRADIENT: Holder.ACTIVATIONS,
    Role.SAVED: Holder.SAVED,
    Role.KEPT: Holder.SAVED,
    Role.HANDOFF: Holder.SAVED,
    Role.PARAMETER_GRADIENT: Holder.GRADIENTS,
    Role.TIED_GRADIENT: Holder.GRADIENTS,
}


def holders_of_slots(dag: Dag, plan: Plan) -> dict[int, Holder]:
    """For each slot, what it is counted as."""
    found = {given.slot: Holder.BATCH for given in plan.given}
    for x in plan.instructions:
        if x.verb is Verb.COMPUTE:
            for value, slot in zip(dag.nodes[x.node].writes, x.writes, strict=True):
                if value >= dag.first_extra:
                    found[slot] = Holder.COMMUNICATION
                else:
                    found[slot] = _BY_ROLE[dag.table.value(value)[0].role]
        elif x.verb is Verb.ADD:
            found[x.writes[0]] = Holder.ACTIVATIONS
        elif x.verb is not Verb.FREE:
            reduced = x.role in (ExtraRole.REDUCED, ExtraRole.SUMMED)
            for slot in x.writes:
                found[slot] = Holder.GRADIENTS if reduced else Holder.COMMUNICATION
    return found
