"""The order in which all nodes of a step are issued, and when, in simulated time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IssueOrder:
    """Nodes in the order in which they are issued, and when each starts and ends."""

    order: tuple[int, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
