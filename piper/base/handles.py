"""The handle of a communication or a copy in progress."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Handle(ABC):
    """A communication or copy that the host waits for."""

    span: tuple[float, float] | None = None
    """Its start and end on ``time.monotonic``, if known."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the host may continue."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until it may continue."""

    def join(self) -> None:
        """Once ``done``: raise the error, if there is one, and make the current stream, if there is
        one, wait for it."""
        self.wait()
