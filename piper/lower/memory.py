"""What a plan holds at every moment: state that stays, and slots from when they are written until
they are freed."""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.dag import Dag
from piper.lower.plan import Plan, Verb
from piper.lower.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one class of devices, in bytes."""

    devices: tuple[int, ...]
    parameters: int
    optimizer: int
    peak: int
    """The most that is held at one time, state included."""
    peak_at: int
    """The instruction after which it is held."""
    over_time: tuple[int, ...]
    """Bytes held after each instruction, state included."""


def memory_of(dag: Dag, plan: Plan, sizes: Sizes, optimizer_bytes: float = 2.0) -> Memory:
    """The memory of ``plan``; ``optimizer_bytes`` is the optimizer's state for each byte of
    parameters (2 for Adam in the parameters' own precision)."""
    mine = plan.devices[0]
    buckets = [
        i for i, bucket in enumerate(dag.buckets) if any(mine in group for group in bucket.groups)
    ]
    parameters = sum(sizes.state(i) for i in buckets)
    optimizer = sum(sizes.optimizer(i, optimizer_bytes) for i in buckets)
    held = parameters + optimizer + sum(plan.slot_bytes[slot] for slot in plan.given)
    over_time = []
    for instruction in plan.instructions:
        if instruction.verb is Verb.FREE:
            held -= plan.slot_bytes[instruction.reads[0]]
        else:
            new = set(instruction.writes) - set(instruction.adds)
            held += sum(plan.slot_bytes[slot] for slot in new)
        over_time.append(held)
    peak = max(over_time, default=held)
    at = over_time.index(peak) if over_time else -1
    return Memory(plan.devices, parameters, optimizer, peak, at, tuple(over_time))
