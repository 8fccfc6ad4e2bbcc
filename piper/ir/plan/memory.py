"""The memory of a class of devices over one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper.base.units import bytes_text
from piper.ir.dag.dag import devices_text
from piper.ir.plan.instructions import MemoryKind


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
    at_peak: Mapping[MemoryKind, int]
    """The peak, by what holds it."""
    over_time: tuple[tuple[int, int], ...]
    """Bytes held beside each instruction, and when what it frees is gone; state included."""

    def __str__(self) -> str:
        parts = ", ".join(f"{h.value} {bytes_text(n)}" for h, n in self.at_peak.items() if n)
        return f"{devices_text(self.devices)}: peak {bytes_text(self.peak)} ({parts})"
