"""The program counter of a device, for readers outside. It may be in shared memory."""

from __future__ import annotations

from typing import Protocol

PC, PLAN, AWAITED = range(3)
"""The numbers of a ``ProgramCounter``: the current instruction in its plan, which of the device's
plans it is, and the communication that it waits for."""
NOWHERE = -1
"""Instead of an instruction: there is none."""


class ProgramCounter(Protocol):
    """Numbers that say where a device is."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...
