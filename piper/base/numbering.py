"""Distinct things, numbered as they come: each is written once, and its number stands for it."""

from __future__ import annotations

from typing import Any


class Numbered:
    """``items`` are the distinct things so far, in the order of their numbers."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any) -> int:
        """The number of ``item``, which may be new."""
        found = self._numbers.get(item)
        if found is None:
            found = self._numbers[item] = len(self.items)
            self.items.append(item)
        return found
