"""The memory of a rank equivalence class over one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from piper.base.units import bytes_text
from piper.ir.dag.dag import devices_text
from piper.ir.dag.ragged import Ints
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
    over_time: Sequence[tuple[int, int]]
    """For each instruction, the most bytes while it runs, and the bytes after its frees; state and
    workspace included."""

    def __str__(self) -> str:
        parts = ", ".join(f"{h.value} {bytes_text(n)}" for h, n in self.at_peak.items() if n)
        return f"{devices_text(self.devices)}: peak {bytes_text(self.peak)} ({parts})"


class OverTime(Sequence[tuple[int, int]]):
    """The memory of each instruction, from two arrays: a plan has many instructions."""

    def __init__(self, most: Ints, after: Ints) -> None:
        self._most, self._after = most, after

    def __len__(self) -> int:
        return len(self._most)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._most.tolist(), self._after.tolist(), strict=True)

    @overload
    def __getitem__(self, at: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[tuple[int, int], ...]: ...
    def __getitem__(self, at: int | slice) -> tuple[int, int] | tuple[tuple[int, int], ...]:
        if isinstance(at, slice):
            return tuple(OverTime(self._most[at], self._after[at]))
        return int(self._most[at]), int(self._after[at])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | OverTime) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
