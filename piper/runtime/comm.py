"""What an executor needs of a way to communicate: messages between two, collectives among many.

Every call begins something and returns a ``Handle``; nothing blocks. ``node`` names the DAG's node
that is being done: all parties of one communication give the same, so nothing depends on luck.
Tensors are contiguous, and whoever communicates keeps them alive until it is done.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Group = tuple[int, ...]


class Handle(Protocol):
    """A communication under way."""

    def done(self) -> bool:
        """Whether it is over, so that what was received can be read."""
        ...

    def wait(self) -> None:
        """Return when it is over."""
        ...

    @property
    def span(self) -> tuple[float, float] | None:
        """When it was taken up and when it was over, on ``time.monotonic``, if that is known."""
        ...


class Comm(Protocol):
    """One device's end of all communication."""

    def send(self, node: int, stream: str, to: int, data: Tensor) -> Handle: ...

    def receive(self, node: int, stream: str, source: int, out: Tensor) -> Handle: ...

    def all_reduce(self, node: int, stream: str, group: Group, data: Tensor) -> Handle:
        """``data`` becomes its sum over the group, added in the group's order."""
        ...

    def reduce_scatter(
        self, node: int, stream: str, group: Group, data: Tensor, out: Tensor
    ) -> Handle:
        """``out`` becomes this member's part of the sum of ``data``."""
        ...

    def all_gather(self, node: int, stream: str, group: Group, part: Tensor, out: Tensor) -> Handle:
        """``out`` becomes all members' parts in the group's order."""
        ...

    def all_to_all(self, node: int, stream: str, group: Group, data: Tensor, out: Tensor) -> Handle:
        """Part i of ``data`` goes to member i; part i of ``out`` comes from member i."""
        ...
