"""Numbers for distinct items, so that a page holds each once."""

from __future__ import annotations

from typing import Any


class Numbered:
    """Numbers distinct items from 0. ``items`` lists them in that order."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any) -> int:
        """The number of ``item``; a new item gets the next number."""
        number = self._numbers.get(item)
        if number is None:
            number = self._numbers[item] = len(self.items)
            self.items.append(item)
        return number
