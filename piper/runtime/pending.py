"""``Pending``: a communication under way. ``BoundInstruction``: type of a loaded instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from piper.base.handles import Handle


class Pending:
    """A communication under way: the handles that the host must complete, the function that stores
    its result, and the objects it keeps alive until it ends."""

    __slots__ = ("_finish", "_handles", "_kept", "name")

    def __init__(
        self,
        name: str,
        handles: Sequence[Handle | None],
        finish: Callable[[], None] | None = None,
        keeps: Sequence[Any] = (),
    ) -> None:
        """``keeps``: objects in use by the communication that nothing else refers to."""
        self.name = name
        self._handles = tuple(handle for handle in handles if handle is not None)
        self._finish = finish
        self._kept = list(keeps)

    @property
    def in_order(self) -> bool:
        """Whether stream order alone is sufficient: the host has nothing to wait for."""
        return not self._handles

    def keep(self, more: Sequence[Any]) -> None:
        """Keep more objects alive until it ends."""
        self._kept += more

    def done(self) -> bool:
        """Whether the host may continue."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> None:
        """Block the host until it may continue. Does not affect streams."""
        for handle in self._handles:
            handle.wait()

    def release(self) -> None:
        """Stop keeping objects alive."""
        self._kept = []

    def complete(self) -> None:
        """Make the result available to the current stream and store it. Kept objects stay alive."""
        for handle in self._handles:
            handle.join()
        if self._finish is not None:
            self._finish()
        self._handles, self._finish = (), None

    @property
    def span(self) -> tuple[float, float] | None:
        """When it started and when it ended, if all handles know."""
        spans = [handle.span for handle in self._handles]
        known = [span for span in spans if span is not None]
        if not known or len(known) < len(spans):
            return None
        return min(start for start, _ in known), max(end for _, end in known)

    def then(self, more: Callable[[], None]) -> Pending:
        """This communication with one more function to call, first, on completion."""
        finish = self._finish

        def both() -> None:
            more()
            if finish is not None:
                finish()

        return Pending(self.name, self._handles, both, self._kept)


BoundInstruction = Callable[[], Pending | None]
"""Does its work, or begins a communication and returns it."""
