"""What an executor needs of a way to communicate: messages between two, collectives among many.

When a plan is loaded, each communication becomes a function of the tensors alone. Every call of it
begins something; nothing blocks. It returns a ``Handle`` if the host has to see it through, or None
if it is in the order of the current CUDA stream: then there is nothing to poll or to wait for, and
whatever the stream runs next comes after it. ``node`` names the DAG's node that is being done: all
participants of one communication give the same, so nothing depends on luck. Tensors are contiguous,
and whoever runs the plan keeps them alive until the communication is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Group = tuple[int, ...]


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


One = Callable[[Tensor], Handle | None]
"""Begins a communication of one tensor."""
Two = Callable[[Tensor, Tensor], Handle | None]
"""Begins one that takes the first tensor and fills the second."""


class Comm(Protocol):
    """One device's end of all communication."""

    any_order: bool
    """Whether messages may be asked for in another order than they are sent in."""

    def send(self, node: int, stream: str, to: int) -> One: ...

    def receive(self, node: int, stream: str, source: int) -> One: ...

    def all_reduce(self, node: int, stream: str, group: Group) -> One:
        """A tensor becomes its sum over the group."""
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

    def close(self) -> None:
        """Release what communication holds."""
        ...
