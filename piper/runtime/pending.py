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
        """Wait for it, take in what it brings, and keep none of it."""
        self.wait()
        if self._finish is not None:
            self._finish()
        self._handles, self._finish = (), None

    @property
    def span(self) -> tuple[float, float] | None:
        """When it was taken up and when it was over, if that is known."""
        spans = [handle.span for handle in self._handles]
        known = [span for span in spans if span is not None]
        if not known or len(known) < len(spans):
            return None
        return min(start for start, _ in known), max(end for _, end in known)

    def then(self, act: Callable[[], None]) -> Pending:
        """The same, with something more to do when it is over."""
        finish = self._finish

        def both() -> None:
            act()
            if finish is not None:
                finish()

        return Pending(self.name, self._handles, both)


Act = Callable[[], Pending | None]
"""A loaded instruction: does its work, or begins a communication."""
