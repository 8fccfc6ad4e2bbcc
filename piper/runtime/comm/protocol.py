"""The transport interface of an executor: point-to-point messages and collectives.

When a plan is loaded, each communication becomes a function that takes only tensors. A call begins
the communication and does not block. It returns a ``Handle`` if the host must wait for it, or None
if it is in the order of the current CUDA stream: then there is nothing to poll or wait for, and
later work of the stream runs after it. ``node`` is the number of the DAG node: all participants of
a communication give the same number, so they match deterministically. Tensors must be contiguous,
and the executor keeps them alive until the communication ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from piper.base.handles import Handle
from piper.ir.collectives import Move
from piper.ir.ops import Group

Begin = Callable[..., Handle | None]
"""Begins a communication with its tensors: one for a message, or as many as the kind of collective
needs. On CPUs a collective also takes one function instead of its tensors. It is called for them
after all earlier communications of the stream."""


def tensors_of(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a collective; calls the function if one was given instead."""
    first = given[0]
    return given if isinstance(first, Tensor) else tuple(first())


class Comm(Protocol):
    """The communication of one device."""

    any_order: bool
    """Whether messages may be received in another order than they are sent."""

    def send(self, node: int, stream: str, to: int) -> Begin: ...

    def receive(self, node: int, stream: str, source: int) -> Begin: ...

    def collective(self, kind: Move, node: int, stream: str, group: Group) -> Begin:
        """``COLLECTIVES`` defines each kind."""
        ...

    def close(self) -> None:
        """Release the resources of communication."""
        ...
