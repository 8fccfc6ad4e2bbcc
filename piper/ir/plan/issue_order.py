"""The order in which all nodes of a step are issued, with simulated times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IssueOrder:
    """Nodes in issue order, and the start and end of each, by node number."""

    order: tuple[int, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
