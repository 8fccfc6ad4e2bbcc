"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Column, Table

from piper.base.units import unit_for
from piper.ir.dag.dag import group_text
from piper.ir.plan.instructions import MemoryKind
from piper.ir.plan.memory import Memory

_SHORT = {
    MemoryKind.PARAMETERS: "params",
    MemoryKind.OPTIMIZER: "optim",
    MemoryKind.BUFFERS: "buffers",
    MemoryKind.GRADIENTS: "grads",
    MemoryKind.SAVED: "saved",
    MemoryKind.ACTIVATIONS: "activ",
    MemoryKind.BATCH: "batch",
    MemoryKind.COMMUNICATION: "comm",
    MemoryKind.WORKSPACE: "work",
}


def memory_table(memories: Sequence[Memory]) -> Table:
    """The memory of each rank class at its peak, by kind."""
    unit, factor = unit_for(max(memory.peak for memory in memories))
    title = f"memory at the peak of a step, {unit}"
    first = Column("devices", no_wrap=True)
    table = Table(first, title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    shown = [h for h in MemoryKind if any(memory.at_peak.get(h, 0) for memory in memories)]
    for holder in shown:
        table.add_column(_SHORT[holder], justify="right", no_wrap=True)
    table.add_column("peak", justify="right", style="bold", no_wrap=True)
    for memory in memories:
        parts = [f"{memory.at_peak.get(h, 0) / factor:,.1f}" for h in shown]
        table.add_row(group_text(memory.devices), *parts, f"{memory.peak / factor:,.1f}")
    return table


def memory_json(memories: Sequence[Memory]) -> list[dict[str, Any]]:
    """The memory of each rank class as JSON data."""
    return [
        {
            "devices": list(memory.devices),
            "peak_bytes": memory.peak,
            "peak_at_instruction": memory.peak_at,
            "at_peak": {holder.value: n for holder, n in memory.at_peak.items()},
        }
        for memory in memories
    ]


def facts_table(facts: Mapping[str, str], title: str) -> Table:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, figure in facts.items():
        table.add_row(name, figure)
    return table


def comparison_table(
    names: Sequence[str], rows: Sequence[tuple[str, str, str, float | None]]
) -> Table:
    """The figures of two results, and their ratio."""
    table = Table("", *map(escape, names), "second / first")
    for column in table.columns[1:]:
        column.justify = "right"
    for what, first, second, ratio in rows:
        table.add_row(what, first, second, "" if ratio is None else f"{ratio:.3f}")
    return table
