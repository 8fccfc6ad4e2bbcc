"""Numbers for values: equal ones have the same number.

Most groups of a DAG are one object in thousands of nodes, and hashing a thousand devices for each
node would take most of the time. So a value that was seen is found by its identity. This is only a
shortcut: it is kept, so no other takes its identity, and the number depends on equality alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Numberable = TypeVar("Numberable", bound=Hashable)


class EqualNumbers(Generic[Numberable]):
    """Numbers values from 0 in the order in which they are first seen."""

    def __init__(self) -> None:
        self._by_identity: dict[int, tuple[Numberable, int]] = {}
        self._by_value: dict[Numberable, int] = {}

    @property
    def values(self) -> list[Numberable]:
        """The distinct values, by number."""
        return [*self._by_value]

    def of(self, value: Numberable) -> int:
        known = self._by_identity.get(id(value))
        if known is None:
            number = self._by_value.setdefault(value, len(self._by_value))
            known = self._by_identity[id(value)] = value, number
        return known[1]
