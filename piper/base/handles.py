"""The handle of a communication or a copy in progress."""

from __future__ import annotations

from typing import Protocol


class Handle(Protocol):
    """A communication or copy that the host waits for."""

    def done(self) -> bool:
        """Whether the host may continue."""
        ...

    def wait(self) -> None:
        """Block the host until it may continue."""
        ...

    def join(self) -> None:
        """Once ``done``: make the current stream, if there is one, wait for it."""
        ...

    @property
    def span(self) -> tuple[float, float] | None:
        """Its start and end on ``time.monotonic``, if known."""
        ...
