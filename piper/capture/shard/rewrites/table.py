"""The table of operations that torch's sharding rules do not have, or that shards compute in
another way: ``@rewrite(op)`` registers a function for an operation. A new one goes into a file of
this folder, and its module into the imports of ``sharding_rules.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from piper.capture.shard.placements import TensorPlacement
from piper.capture.shard.shard_axis import ShardAxis


class Share(Protocol):
    """One device's share of a graph, as a rewrite sees it."""

    axis: ShardAxis

    def read(self, node: fx.Node) -> fx.Node:
        """The local value of an input, in the placement in which the operation reads it."""
        ...

    def call(self, target: Any, *args: Any, sharded: bool = True, **kwargs: Any) -> fx.Node:
        """An operation on local values."""
        ...

    def run(self, function: Callable[..., Any], *given: fx.Node, sharded: bool = True) -> Any:
        """Operations on local values: those that ``function``, plain torch code, calls on them.
        Returns what it returns."""
        ...

    def rank(self) -> fx.Node:
        """The device's index along the axis."""
        ...

    def positions(self, size: int) -> fx.Node:
        """The positions in the whole of the ``size`` elements of this device's part."""
        ...

    def noise(self, dropout: fx.Node, dim: int) -> fx.Node:
        """The factors by which a dropout of the whole multiplies this device's part along
        ``dim``."""
        ...

    def moved(
        self, local: fx.Node, made: TensorPlacement, wanted: TensorPlacement, *, sharded: bool
    ) -> fx.Node:
        """A local value in another layout, for a reader that computes on shards or not."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """How an operation is computed on shards."""

    reads: Mapping[fx.Node, Any]
    """The placements in which it reads its inputs."""
    made: Any
    """The placement of its result, or of each of several."""
    emit: Callable[[Share], fx.Node] | None = None
    """Adds it to a share; None if it is the operation itself, at local shapes."""
    fixed: bool = False
    """Whether the result is a part of a parameter."""


Rewrite = Callable[[fx.Node, Mapping[fx.Node, Any], ShardAxis], Form | None]
"""The form of an operation whose inputs are placed so along an axis; None if there is none."""

REWRITES: dict[object, list[Rewrite]] = {}
WITHOUT_TORCH: set[object] = set()
"""Operations for which torch is not asked."""


def rewrite(*targets: object, torch: bool = True) -> Callable[[Rewrite], Rewrite]:
    """Register a function for operations. If it gives None, the next one is asked, and at last
    torch's rule, unless ``torch`` is False."""

    def register(function: Rewrite) -> Rewrite:
        for target in targets:
            REWRITES.setdefault(target, []).append(function)
        if not torch:
            WITHOUT_TORCH.update(targets)
        return function

    return register
