"""A communication or a copy under way."""

from __future__ import annotations

from typing import Protocol


class Handle(Protocol):
    """A communication that the host sees through."""

    def done(self) -> bool:
        """Whether the host may go on."""
        ...

    def wait(self) -> None:
        """Block the host until it may go on."""
        ...

    def join(self) -> None:
        """Once ``done``: let the current stream, if there is one, come after it."""
        ...

    @property
    def span(self) -> tuple[float, float] | None:
        """When it was taken up and when it was over, on ``time.monotonic``, if that is known."""
        ...
