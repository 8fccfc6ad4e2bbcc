"""The values of one device's share, by the nodes of the whole: each as it is made, and in every
other placement in which an operation reads it.

A value that is read in another placement is redistributed, unless each device can compute it so by
itself: from a tensor of the batch that all devices have whole, or from parameters alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.distributed.tensor import Partial, Shard
from torch.utils import _pytree as pytree

from piper.capture.graphs import is_random
from piper.capture.shard.local_graph import LocalGraph, differentiable
from piper.capture.shard.placement_search import Placing
from piper.capture.shard.placements import (
    REPLICATED,
    LocalLayout,
    Routed,
    ShardedSections,
    TensorPlacement,
)
from piper.capture.shard.rewrites.routing import UnroutedError

aten = torch.ops.aten


class LocalValues(dict[fx.Node, fx.Node]):
    """The local value of each node, in the placement in which it is made."""

    def __init__(self, placing: Placing, out: LocalGraph) -> None:
        super().__init__()
        self._placing, self._out, self._made = placing, out, placing.made
        self._forms: dict[tuple[fx.Node, LocalLayout, bool], fx.Node] = {}
        self._derived: set[fx.Node] = set()
        """Values computed from parameters alone. Sharded computations recompute them, so that their
        gradients are summed with those of the parameters, once a step."""
        self._wholes: dict[fx.Node, fx.Node] = {}
        """The whole of split inputs without gradients, and of values computed from them."""

    def split(self, node: fx.Node, dim: int) -> None:
        """Take this device's part, along ``dim``, of an input that all devices have whole."""
        if not differentiable(self[node]):
            self._wholes[node] = self[node]
            self._placing.free.add(node)
        self[node] = self._out.slice(self[node], dim)
        self._made[node] = Shard(dim)

    def note_free(self, node: fx.Node) -> None:
        """Mark ``node`` as free if it depends only on free values and constants."""
        free, constants = self._placing.free, self._out.constants
        read = node.all_input_nodes
        known = all(x in free or self[x] in constants for x in read)
        plain = isinstance(node.target, OpOverload) and not is_random(node)
        if plain and known and not free.isdisjoint(read):
            free.add(node)

    def note_derived(self, node: fx.Node) -> None:
        """Mark the replicated ``node`` as derived if it depends only on parameters."""
        inputs = node.all_input_nodes
        known = all(x in self._placing.fixed or x in self._derived for x in inputs)
        if inputs and known and not is_random(node):
            self._derived.add(node)

    def read(self, node: fx.Node, placement: Any, sharded: bool) -> fx.Node:
        """The local value of ``node`` in ``placement``, for a reader that is ``sharded`` or not."""
        made, local = self._made[node], self[node]
        if placement is None or isinstance(made, tuple):
            return local
        if isinstance(made, Routed) and made != placement:
            raise UnroutedError
        made_sharded = made != REPLICATED or local in self._out.sharded
        plain = (
            self._placing.strict
            or node in self._placing.fixed
            or local in self._out.constants
            or not differentiable(local)
        )
        if made == placement and (made != REPLICATED or made_sharded == sharded or plain):
            return local
        if made == REPLICATED == placement and made_sharded:
            return local  # a sharded computation's replicated result has no gradient
        key = node, placement, sharded
        if key not in self._forms:
            if node in self._placing.free and isinstance(placement, TensorPlacement):
                self._forms[key] = self._of_whole(node, placement)
            elif _other_sections(made, placement):
                whole = self.read(node, REPLICATED, sharded)
                self._forms[key] = self._out.part(whole, placement)
            elif made == REPLICATED == placement and node in self._derived:
                self._forms[key] = self._again(node)
            else:
                if node in self._placing.fixed:  # only values move: copy it
                    local = self._out.call(aten.clone.default, (local,), made_sharded)
                moved = self._out.redistributed(
                    local, made, placement, before=made_sharded, after=sharded
                )
                self._forms[key] = self._without_padding(moved, node, made, sharded)
            if isinstance(made, Partial) and placement == self._placing.resolved(node.meta["val"]):
                self._placing.reduced.add(node)
        return self._forms[key]

    def _of_whole(self, node: fx.Node, placement: TensorPlacement) -> fx.Node:
        """``node`` in ``placement``, from the whole that every device computes for itself."""
        if isinstance(placement, Shard):
            return self._out.slice(self._of_whole(node, REPLICATED), placement.dim)
        if node not in self._wholes:
            free = self._placing.free
            args, kwargs = pytree.tree_map_only(
                fx.Node,
                lambda x: self._of_whole(x, REPLICATED) if x in free else self[x],
                (node.args, dict(node.kwargs)),
            )
            self._wholes[node] = self._out.call(node.target, args, True, **kwargs)
        return self._wholes[node]

    def _without_padding(self, moved: fx.Node, node: fx.Node, made: Any, sharded: bool) -> fx.Node:
        """``moved`` without the padding of a gathered dimension that is not divisible."""
        ways = self._placing.axis.ways
        if not isinstance(made, Shard) or node.meta["val"].shape[made.dim] % ways == 0:
            return moved
        size = node.meta["val"].shape[made.dim]
        return self._out.call(aten.slice.Tensor, (moved, made.dim, 0, size), sharded)

    def _again(self, node: fx.Node) -> fx.Node:
        """A value computed from parameters, recomputed for a sharded reader."""
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda x: self.read(x, REPLICATED, True), (node.args, dict(node.kwargs))
        )
        return self._out.call(node.target, args, True, **kwargs)


def _other_sections(made: LocalLayout, wanted: LocalLayout) -> bool:
    """Whether ``made`` and ``wanted`` shard different sections of a dimension."""
    if isinstance(made, ShardedSections) and isinstance(wanted, Shard):
        return made.dim == wanted.dim
    return isinstance(wanted, ShardedSections)
