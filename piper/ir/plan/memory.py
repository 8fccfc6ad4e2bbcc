"""The memory of a rank equivalence class over one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper.base.units import bytes_text
from piper.ir.dag.dag import devices_text
from piper.ir.plan.instructions import MemoryKind


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of each device of one class, in bytes."""

    devices: tuple[int, ...]
    parameters: int
    optimizer: int
    peak: int
    """Peak bytes, state included."""
    peak_at: int
    """The instruction at which the peak is reached."""
    at_peak: Mapping[MemoryKind, int]
    """The peak by memory kind."""
    over_time: tuple[tuple[int, int], ...]
    """For each instruction, the most bytes while it runs, and the bytes after its frees; state and
    workspace included."""

    def __str__(self) -> str:
        parts = ", ".join(f"{h.value} {bytes_text(n)}" for h, n in self.at_peak.items() if n)
        return f"{devices_text(self.devices)}: peak {bytes_text(self.peak)} ({parts})"
