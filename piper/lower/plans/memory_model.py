"""The memory of a plan over time: persistent state, slots from when they are written until they are
freed, and the temporary memory of each instruction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from piper.ir.dag.dag import Dag
from piper.ir.dag.sizes import Sizes
from piper.ir.ops import Compute
from piper.ir.plan.instructions import BESIDE, MemoryKind
from piper.ir.plan.memory import Memory
from piper.ir.plan.plan import Plan
from piper.ir.rules import OptimizerCost


def memory_of(dag: Dag, plan: Plan, sizes: Sizes, optimizer: OptimizerCost) -> Memory:
    """An upper bound on the memory of ``plan``."""
    mine = plan.devices[0]
    buckets = [
        i for i, bucket in enumerate(dag.buckets) if any(mine in group for group in bucket.groups)
    ]
    parameters = sum(sizes.state(i) for i in buckets)
    kept = sum(_optimizer(dag, sizes, i, optimizer) for i in buckets)
    slots = plan.slots
    book = _Book(
        {
            MemoryKind.PARAMETERS: parameters,
            MemoryKind.OPTIMIZER: kept,
            MemoryKind.BUFFERS: _buffers(dag, plan),
        }
    )
    live = set(plan.first_slots)
    for slot in live:
        book.add(slots[slot].holder, slots[slot].own)
    book.look(-1)
    over_time = []
    ends = {c: pc for pc, x in enumerate(plan.instructions) for c in x.ends}

    def end_of(pc: int) -> float:
        return ends.get(pc, math.inf)

    kinds = [slot.holder for slot in slots]
    own = [slot.own for slot in slots]
    holders: dict[int, int] = {}
    """By slot, the communication in progress that holds it and ends last."""
    released: defaultdict[int, list[int]] = defaultdict(list)
    """By communication, the freed slots that it holds until it ends."""
    for pc, x in enumerate(plan.instructions):
        most = 0
        for other in x.ends:
            ended = plan.instructions[other]
            if ended.at_end:
                most = max(most, book.look(pc, ended.at_end))
            book.add(MemoryKind.COMMUNICATION, -ended.beside)
            for slot in released.pop(other, ()):
                book.add(kinds[slot], -own[slot])
        for slot in (*x.allocates, *x.writes):
            if slot not in live:
                live.add(slot)
                book.add(kinds[slot], own[slot])
        if x.verb in BESIDE:
            book.add(MemoryKind.COMMUNICATION, x.beside)
            for slot in x.holds:
                holders[slot] = max(holders.get(slot, pc), pc, key=end_of)
        most = max(most, book.look(pc, x.workspace))
        for slot in x.frees:
            live.remove(slot)
            holder = holders.pop(slot, None)
            if holder is not None and end_of(holder) > pc:
                released[holder].append(slot)
            else:
                book.add(kinds[slot], -own[slot])
        over_time.append((most, book.total))
    at_peak = {holder: book.at_peak.get(holder, 0) for holder in MemoryKind}
    return Memory(plan.devices, parameters, kept, book.peak, book.at, at_peak, tuple(over_time))


def _optimizer(dag: Dag, sizes: Sizes, bucket: int, cost: OptimizerCost) -> int:
    held = dag.buckets[bucket]
    scalars = cost.scalars * len(held.parameters) if held.trained else 0
    return sizes.optimizer(bucket, cost.state) + scalars


def _buffers(dag: Dag, plan: Plan) -> int:
    """Bytes of the buffers and constants that the passes of a plan read."""
    chunks = {x.op.chunk for x in plan.instructions if isinstance(x.op, Compute)}
    names = {name for chunk in chunks for name in dag.model.chunks[chunk].buffers}
    return sum(dag.model.buffers.get(name, 0) for name in names)


class _Book:
    """Bytes in use by memory kind, and their peak."""

    def __init__(self, held: Mapping[MemoryKind, int]) -> None:
        self.held = {**dict.fromkeys(MemoryKind, 0), **held}
        self.total = sum(held.values())
        self.peak, self.at = -1, -1
        self.at_peak: Mapping[MemoryKind, int] = {}

    def add(self, holder: MemoryKind, nbytes: int) -> None:
        self.held[holder] += nbytes
        self.total += nbytes

    def look(self, pc: int, workspace: int = 0) -> int:
        """The bytes in use now plus ``workspace``, which update the peak."""
        busy = self.total + workspace
        if busy > self.peak:
            self.peak, self.at = busy, pc
            self.at_peak = {**self.held, MemoryKind.WORKSPACE: workspace}
        return busy
