"""Numbers for distinct items, so that a page holds each once."""

from __future__ import annotations

from typing import Any


class Numbered:
    """Numbers distinct items from 0."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any) -> int:
        """The number of ``item``; a new item gets the next number."""
        return self._numbers.setdefault(item, len(self._numbers))

    @property
    def items(self) -> list[Any]:
        """The distinct items in the order of their numbers."""
        return list(self._numbers)
