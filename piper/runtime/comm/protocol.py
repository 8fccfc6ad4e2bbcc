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
from typing import Any, Protocol

from torch import Tensor

from piper.base.handles import Handle
from piper.ir.collectives import CollectiveKind
from piper.ir.ops import Group

Begin = Callable[..., Handle | None]
"""Begins a communication: a message of one tensor, or a collective of those that its kind needs. On
CPUs a collective may be given one function in their place, which is called for them when all that
its stream does before is over."""


def tensors_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a collective works on, when its turn has come."""
    first = given[0]
    return given if isinstance(first, Tensor) else tuple(first())


class Comm(Protocol):
    """One device's end of all communication."""

    any_order: bool
    """Whether messages may be asked for in another order than they are sent in."""

    def send(self, node: int, stream: str, to: int) -> Begin: ...

    def receive(self, node: int, stream: str, source: int) -> Begin: ...

    def collective(self, kind: CollectiveKind, node: int, stream: str, group: Group) -> Begin:
        """``collectives.py`` says what each kind does."""
        ...

    def close(self) -> None:
        """Release what communication holds."""
        ...
