"""Checks a plan against the memory limit. The error says when and for what memory is needed, and
what to change."""

from __future__ import annotations

from collections import Counter

from piper.base.errors import DirectiveError
from piper.base.units import bytes_text
from piper.ir.dag.dag import Dag, devices_text, region_of
from piper.ir.ops import Compute
from piper.ir.plan.instructions import MemoryKind
from piper.ir.plan.memory import Memory
from piper.ir.plan.plan import Plan


def check_limit(dag: Dag, memory: Memory, plan: Plan, limit: int) -> None:
    """Refuse a plan whose peak memory exceeds ``limit`` bytes."""
    if memory.peak <= limit:
        return
    when = plan.instructions[memory.peak_at].name if memory.peak_at >= 0 else "the start"
    largest = sorted(memory.at_peak.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{holder.value} {bytes_text(n)}" for holder, n in largest[:4] if n)
    need = "needs" if len(memory.devices) == 1 else "need"
    raise DirectiveError(
        f"memory_limit={limit:,} is not enough: {devices_text(memory.devices)} {need} "
        f"{memory.peak:,} bytes ({bytes_text(memory.peak)}) at instruction {memory.peak_at} "
        f"({when}); the largest holders: {shown}{_named(dag, memory, plan)}. "
        f"{_advice(largest[0][0])}"
    )


def _named(dag: Dag, memory: Memory, plan: Plan) -> str:
    """The regions whose values take most memory at the peak, for the message."""
    live: dict[int, str] = {}
    freed: tuple[int, ...] = ()
    for x in plan.instructions[: memory.peak_at + 1]:
        for slot in freed:
            live.pop(slot, None)
        freed = x.frees
        if isinstance(x.op, Compute):
            live |= dict.fromkeys(x.writes, region_of(dag, x.op.chunk))
    sizes: Counter[tuple[MemoryKind, str]] = Counter()
    for slot, region in live.items():
        sizes[plan.slots[slot].holder, region] += plan.slots[slot].nbytes
    rows = [
        f"{h.value} of {region} {bytes_text(n)}" for (h, region), n in sizes.most_common(3) if n
    ]
    return f" (most of all: {', '.join(rows)})" if rows else ""


def _advice(holder: MemoryKind) -> str:
    match holder:
        case MemoryKind.PARAMETERS | MemoryKind.OPTIMIZER | MemoryKind.GRADIENTS:
            return "Use more stages, or replicate with a higher zero level over more devices"
        case MemoryKind.SAVED | MemoryKind.ACTIVATIONS | MemoryKind.WORKSPACE:
            return "Use remat, more microbatches, or an order with fewer of them in flight"
        case _:
            return "Use more microbatches, or smaller buckets"
