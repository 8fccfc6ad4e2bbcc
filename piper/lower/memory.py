"""What a plan holds at every moment: state that stays, slots from when they are written until they
are freed, and what an instruction needs only while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from piper.errors import DirectiveError
from piper.ir.dag import Compute, Dag
from piper.ir.text import group_text
from piper.ir.values import ExtraRole, Role
from piper.lower.plan import Instruction, Plan, Verb
from piper.lower.sizes import Sizes


class Holder(Enum):
    """What memory is held by."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
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
        parts = ", ".join(f"{h.value} {_size(n)}" for h, n in self.at_peak.items() if n)
        return f"devices {group_text(self.devices)}: peak {_size(self.peak)} ({parts})"


def _size(nbytes: int) -> str:
    """Bytes in a unit that fits."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.1f} {unit}"
    return f"{nbytes} B"


def memory_of(dag: Dag, plan: Plan, sizes: Sizes, optimizer_bytes: float) -> Memory:
    """The memory of ``plan``; ``optimizer_bytes`` is the optimizer's state for each byte of
    parameters (2 for Adam in the parameters' own precision)."""
    mine = plan.devices[0]
    buckets = [
        i for i, bucket in enumerate(dag.buckets) if any(mine in group for group in bucket.groups)
    ]
    parameters = sum(sizes.state(i) for i in buckets)
    optimizer = sum(sizes.optimizer(i, optimizer_bytes) for i in buckets)
    holders = _holders(dag, plan)
    size = plan.slot_bytes
    live = dict.fromkeys(Holder, 0)
    for given in plan.given:
        live[Holder.BATCH] += size[given.slot]
    held = parameters + optimizer + live[Holder.BATCH]
    peak, at, breakdown = held, -1, dict(live)
    over_time = []
    for place, x in enumerate(plan.instructions):
        if x.verb is Verb.FREE:
            slot = x.reads[0]
            held -= size[slot]
            live[holders[slot]] -= size[slot]
        else:
            for slot in x.writes:
                if slot not in x.adds:
                    held += size[slot]
                    live[holders[slot]] += size[slot]
            extra = _workspace(dag, sizes, x, size)
            if held + extra > peak:
                peak, at = held + extra, place
                breakdown = {**live, Holder.WORKSPACE: extra}
        over_time.append(held)
    state = {Holder.PARAMETERS: parameters, Holder.OPTIMIZER: optimizer}
    found = {holder: {**breakdown, **state}.get(holder, 0) for holder in Holder}
    return Memory(plan.devices, parameters, optimizer, peak, at, found, tuple(over_time))


def _workspace(dag: Dag, sizes: Sizes, x: Instruction, size: tuple[int, ...]) -> int:
    """Bytes that an instruction needs while it runs beside what it reads and writes."""
    if isinstance(x.op, Compute):
        new = sum(size[slot] for slot in x.adds)  # made first, then added
        return sizes.facts(x.op, len(dag.nodes[x.node].devices)).workspace + new
    if x.role is ExtraRole.REDUCED:
        # all that is reduced lies in one buffer; some of it stays
        whole = sizes.whole(x.of) * dag.buckets[x.of].gradient.itemsize
        return whole if x.adds else whole - size[x.writes[0]]
    return 0


_BY_ROLE = {
    Role.BATCH: Holder.BATCH,
    Role.SEED: Holder.BATCH,
    Role.ACTIVATION: Holder.ACTIVATIONS,
    Role.GRADIENT: Holder.ACTIVATIONS,
    Role.SAVED: Holder.SAVED,
    Role.HANDOFF: Holder.SAVED,
    Role.PARAMETER_GRADIENT: Holder.GRADIENTS,
    Role.TIED_GRADIENT: Holder.GRADIENTS,
}


def _holders(dag: Dag, plan: Plan) -> dict[int, Holder]:
    """For each slot, what it is counted as."""
    found = {given.slot: Holder.BATCH for given in plan.given}
    for x in plan.instructions:
        if x.verb is Verb.COMPUTE:
            for value, slot in zip(dag.nodes[x.node].writes, x.writes, strict=True):
                if value >= dag.first_extra:
                    found[slot] = Holder.COMMUNICATION
                else:
                    found[slot] = _BY_ROLE[dag.table.value(value)[0].role]
        elif x.verb is not Verb.FREE:
            reduced = x.role is ExtraRole.REDUCED
            for slot in x.writes:
                found[slot] = Holder.GRADIENTS if reduced else Holder.COMMUNICATION
    return found


def check_limit(memory: Memory, plan: Plan, limit: int) -> None:
    """Refuse a plan that needs more than ``limit`` bytes, saying when and what for."""
    if memory.peak <= limit:
        return
    when = plan.instructions[memory.peak_at].name if memory.peak_at >= 0 else "the start"
    largest = sorted(memory.at_peak.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{holder.value} {_size(n)}" for holder, n in largest[:4] if n)
    raise DirectiveError(
        f"memory_limit={limit:,} is not enough: devices {group_text(memory.devices)} need "
        f"{memory.peak:,} bytes ({_size(memory.peak)}) at instruction {memory.peak_at} ({when}); "
        f"the largest holders: {shown}. {_advice(largest[0][0])}"
    )


def _advice(holder: Holder) -> str:
    match holder:
        case Holder.PARAMETERS | Holder.OPTIMIZER | Holder.GRADIENTS:
            return "Use more stages, or replicate with a higher zero level over more devices"
        case Holder.SAVED | Holder.ACTIVATIONS | Holder.WORKSPACE:
            return "Use remat, more microbatches, or an order with fewer of them in flight"
        case _:
            return "Use more microbatches, or smaller buckets"
