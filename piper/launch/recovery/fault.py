"""What a trainer says of a fault from which its workers recovered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recovery:
    """Workers failed, and training continued as if they had not."""

    why: str
    """What failed, where and how."""
    replaced: tuple[int, ...]
    """The devices that got a new process."""
    repeated: int
    """The calls since the last copy of the state that were made again."""
    seconds: float
    """From the moment when the fault was known until the failed call could be made again."""
    lost: tuple[int, ...] = ()
    """The devices that training continues without (``recover="reroute"``)."""
