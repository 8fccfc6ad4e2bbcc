"""Grouped-query attention with fewer key and value heads than devices: each device computes the
head that its queries need, as several others do, and no activation is communicated for it.

    k = linear(x, w [2 heads])     device 0 of 4 has head 0, device 1 has head 0, 2 and 3 head 1

The weights are repeated, head by head, to one head for each device, and so are the values computed
with them up to the attention. A device with a shard of a weight first gathers the weight, if that
is fewer bytes than redistributing keys and values. A device with a whole weight selects its head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from piper.capture.experts.part_rules import Mixed, UnknownOperation, part_rules
from piper.capture.graphs import called, is_random
from piper.capture.shard.placements import REPLICATED, Placements
from piper.capture.shard.rewrites.attention import repeated_heads
from piper.capture.shard.rewrites.shapes import resized

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Wider:
    """An operation whose result has repeated heads."""

    dim: int
    """The dimension of the heads."""
    heads: int
    times: int
    """How often each is repeated."""
    parameters: tuple[fx.Node, ...]
    """Parameters that are read with repeated heads."""

    def again(self, copy: fx.Graph, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """``node`` with repeated heads, in ``copy``."""
        repeated = {
            x: called(copy, x, repeated_heads, new[x], self.heads, self.times)
            for x in node.all_input_nodes
            if x in self.parameters
        }
        taken = {**new, **repeated}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), taken.__getitem__)
        shape = list(node.meta["val"].shape)
        shape[self.dim] *= self.times
        target, args, kwargs = resized(node.target, args, kwargs, shape)
        return called(copy, node, target, *args, **kwargs)


def wider_heads(
    attention: fx.Node, placed: Mapping[fx.Node, Any], heads: int, times: int
) -> dict[fx.Node, Wider]:
    """The operations from the weights of keys and values to ``attention``, with repeated heads;
    empty if keys or values are computed in another way, or if this would send more bytes."""
    operations: dict[fx.Node, Wider] = {}
    query, *ends = attention.args[:3]
    ways, exchanged, gathered = heads * times, 0, 0
    for end in ends:
        assert isinstance(end, fx.Node)
        path = _path(attention, end)
        parameters = tuple(x for node in path[:1] for x in node.args[1:] if isinstance(x, fx.Node))
        dims = _dims(path, parameters, heads, placed)
        if dims.get(end) != len(end.meta["val"].shape) - 3:
            return {}
        shared = query.meta["val"].shape[-3] // heads  # type: ignore[union-attr]
        # before and after repetition for the queries
        exchanged += end.meta["val"].nbytes * (1 + shared)
        sharded = [x for x in parameters if placed[x] != REPLICATED]
        gathered += sum(x.meta["val"].nbytes for x in sharded) * (ways - 1)
        operations |= {x: Wider(dim, heads, times, parameters) for x, dim in dims.items()}
    return operations if gathered < exchanged else {}


def _path(attention: fx.Node, end: fx.Node) -> list[fx.Node]:
    """The operations from the only product with a weight to ``end``, both included; empty if
    ``attention`` is not their only other reader."""
    before, products, left = {end}, set(), [end]
    while left:
        node = left.pop()
        if node.target is aten.linear.default:
            products.add(node)
            continue
        new = [x for x in node.all_input_nodes if x not in before]
        before.update(new)
        left += new
    if len(products) != 1:
        return []
    path = list(products)
    ordered = [node for node in attention.graph.nodes if node in before]
    for node in ordered:
        if node not in path and not set(path).isdisjoint(node.all_input_nodes):
            path.append(node)
    readers = {user for node in path for user in node.users}
    return path if readers == {*path[1:], attention} else []


def _dims(
    path: list[fx.Node], parameters: tuple[fx.Node, ...], heads: int, placed: Mapping[fx.Node, Any]
) -> dict[fx.Node, int]:
    """The dimension of the heads in each value of a path, if each operation computes each head by
    itself; else empty. No operation may round to another dtype: gradients of equal heads are summed
    after it, and would be rounded one by one."""
    if any(placed.get(x) not in (REPLICATED, Shard(0)) for x in parameters):
        return {}
    if any(x.meta["val"].shape[0] % heads for x in parameters):
        return {}
    known: dict[fx.Node, Placements] = {}
    for node in path:
        known |= {x: REPLICATED for x in node.all_input_nodes if x not in known}
        known |= dict.fromkeys(parameters, Shard(0))
        try:
            made = known[node] = part_rules(heads).of(node, known)
        except (Mixed, UnknownOperation):
            return {}
        same = node.meta["val"].dtype is path[0].meta["val"].dtype and not is_random(node)
        if type(made) is not Shard or not same:
            return {}
    return {node: known[node].dim for node in path}  # type: ignore[union-attr]
