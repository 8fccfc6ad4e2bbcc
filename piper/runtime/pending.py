"""A communication under way, and what a bound instruction is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from piper.base.handles import Handle


class Pending:
    """A communication under way: what the host has to see through, what is to be done with what it
    brings, and what it keeps alive until it is over."""

    __slots__ = ("_finish", "_handles", "_kept", "name")

    def __init__(
        self,
        name: str,
        handles: Sequence[Handle | None],
        finish: Callable[[], None] | None = None,
        keeps: Sequence[Any] = (),
    ) -> None:
        """``keeps`` is what nothing else refers to while it is being communicated."""
        self.name = name
        self._handles = tuple(handle for handle in handles if handle is not None)
        self._finish = finish
        self._kept = list(keeps)

    @property
    def in_order(self) -> bool:
        """Whether the current stream's order is all that is needed, and the host has no part."""
        return not self._handles

    def keep(self, more: Sequence[Any]) -> None:
        """Keep more alive until it is over."""
        self._kept += more

    def done(self) -> bool:
        """Whether the host may go on."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> None:
        """Block the host until it may go on; streams are not concerned."""
        for handle in self._handles:
            handle.wait()

    def release(self) -> None:
        """Keep nothing alive any more."""
        self._kept = []

    def complete(self) -> None:
        """Take in what it brings, for the current stream; what it keeps, it keeps on."""
        for handle in self._handles:
            handle.join()
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

    def then(self, more: Callable[[], None]) -> Pending:
        """The same, with something more to do when it is over."""
        finish = self._finish

        def both() -> None:
            more()
            if finish is not None:
                finish()

        return Pending(self.name, self._handles, both, self._kept)


BoundInstruction = Callable[[], Pending | None]
"""A bound instruction: does its work, or begins a communication."""
