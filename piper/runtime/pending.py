"""A communication under way, and what a loaded instruction is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from piper.runtime.comm import Handle


class Pending:
    """A communication under way, and what is to be done with what it brings."""

    __slots__ = ("_finish", "_handles", "name")

    def __init__(
        self, name: str, handles: Sequence[Handle], finish: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self._handles = handles
        self._finish = finish

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def wait(self) -> None:
        """Return when it is over."""
        for handle in self._handles:
            handle.wait()

    def complete(self) -> None:
        """Wait for it, and take in what it brings."""
        self.wait()
        if self._finish is not None:
            self._finish()


Act = Callable[[], Pending | None]
"""A loaded instruction: does its work, or begins a communication."""
