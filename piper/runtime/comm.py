"""What an executor needs of a way to communicate: messages between two, collectives among many.

When a plan is loaded, each communication becomes a function of the tensors alone. Every call of it
begins something and returns a ``Handle``; nothing blocks. ``node`` names the DAG's node that is
being done: all parties of one communication give the same, so nothing depends on luck. Tensors are
contiguous, and whoever communicates keeps them alive until it is done.
"""

from __future__ import annotations

from collections.abc import Callable
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


One = Callable[[Tensor], Handle]
"""Begins a communication of one tensor."""
Two = Callable[[Tensor, Tensor], Handle]
"""Begins one that takes the first tensor and fills the second."""


class Comm(Protocol):
    """One device's end of all communication."""

    any_order: bool
    """Whether messages may be asked for in another order than they are sent in."""

    def send(self, node: int, stream: str, to: int) -> One: ...

    def receive(self, node: int, stream: str, source: int) -> One: ...

    def all_reduce(self, node: int, stream: str, group: Group) -> One:
        """A tensor becomes its sum over the group, added in the group's order."""
        ...

    def reduce_scatter(self, node: int, stream: str, group: Group) -> Two:
        """The second becomes this member's part of the sum of the first."""
        ...

    def all_gather(self, node: int, stream: str, group: Group) -> Two:
        """The second becomes all members' parts in the group's order."""
        ...

    def all_to_all(self, node: int, stream: str, group: Group) -> Two:
        """Part i of the first goes to member i; part i of the second comes from member i."""
        ...
