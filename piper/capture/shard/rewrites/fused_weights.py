"""Fused weights: the result of one product is split into several (q, k and v; gate and up), each
sharded separately.

    [q q q q k k v v] over 2 devices     [q q k v] [q q k v]

The sections follow from where the result is split, even after a view as heads. The operation that
splits them makes shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from piper.capture.graphs import arguments
from piper.capture.shard.placements import ShardedSections
from piper.capture.shard.rewrites.shapes import VIEWS
from piper.capture.shard.rewrites.table import Form, Share, rewrite
from piper.capture.shard.shard_axis import ShardAxis

aten = torch.ops.aten
SPLITS = (aten.split_with_sizes.default, aten.split.sizes, aten.split.Tensor, aten.chunk.default)
TURNS = (aten.transpose.int, aten.permute.default, aten.t.default, aten.numpy_T.default)


@rewrite(*SPLITS)
def split(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """The sections, each in its shards."""
    (source,) = node.all_input_nodes
    packed = placed[source]
    if not isinstance(packed, ShardedSections) or dim_of(node) != packed.dim:
        return None
    if tuple(int(x.shape[packed.dim]) for x in node.meta["val"]) != packed.sections:
        return None

    def emit(share: Share) -> fx.Node:
        sizes = [n // axis.ways for n in packed.sections]
        return share.call(aten.split_with_sizes.default, share.read(source), sizes, packed.dim)

    return Form(placed, (Shard(packed.dim),) * len(packed.sections), emit)


@rewrite(aten.slice.Tensor)
def sliced(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """One of the sections."""
    (source,) = node.all_input_nodes
    packed = placed[source]
    if not isinstance(packed, ShardedSections) or dim_of(node) != packed.dim:
        return None
    edges = [0, *itertools.accumulate(packed.sections)]
    taken = bounds(node, edges[-1])
    if taken not in itertools.pairwise(edges):
        return None

    def emit(share: Share) -> fx.Node:
        start, end = (edge // axis.ways for edge in taken)
        return share.call(aten.slice.Tensor, share.read(source), packed.dim, start, end)

    return Form(placed, Shard(packed.dim), emit)


def sections_of(product: fx.Node) -> tuple[int, ...]:
    """The sizes into which the last dimension of a product is split; empty if it is not."""
    node, dim, unit = product, len(product.meta["val"].shape) - 1, 1
    while True:
        size = node.meta["val"].shape[dim]
        sizes = _split(node, dim, size)
        if sizes:
            return tuple(n * unit for n in sizes)
        if len(node.users) != 1:
            return ()
        node, before = next(iter(node.users)), node
        moved = _followed(node, before, dim)
        if moved is None:
            return ()
        dim = moved
        unit *= size // node.meta["val"].shape[dim]


def _split(node: fx.Node, dim: int, size: int) -> tuple[int, ...]:
    """The sizes into which the readers of a node split it along ``dim``."""
    edges: set[tuple[int, int]] = set()
    for user in node.users:
        if user.target in SPLITS and dim_of(user) == dim:
            sizes = tuple(int(x.shape[dim]) for x in user.meta["val"])
            return sizes if len(sizes) > 1 else ()
        if user.target is aten.slice.Tensor and dim_of(user) == dim:
            edges.add(bounds(user, size))
    ordered = sorted(edges)
    tiles = all(a[1] == b[0] for a, b in itertools.pairwise(ordered))
    if len(ordered) > 1 and tiles and (ordered[0][0], ordered[-1][1]) == (0, size):
        return tuple(stop - start for start, stop in ordered)
    return ()


def _followed(node: fx.Node, before: fx.Node, dim: int) -> int | None:
    """The dimension of ``node``'s result that holds dimension ``dim`` of its input ``before``."""
    if node.op != "call_function":
        return None
    value = node.meta["val"]
    if node.target is aten.add.Tensor and value.shape == before.meta["val"].shape:
        return dim
    if node.target in TURNS:
        return turned(node, len(value.shape)).index(dim)
    if node.target in VIEWS:
        return _viewed(before.meta["val"].shape, value.shape, dim)
    return None


def turned(node: fx.Node, rank: int) -> list[int]:
    """The order of the dimensions after a transpose."""
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [d % rank for d in _integers(node.args[1])]
    if node.target is not aten.transpose.int:
        return order[::-1]
    a, b = (d % rank for d in _integers(node.args[1:3]))
    order[a], order[b] = order[b], order[a]
    return order


def _viewed(shape: Sequence[int], other: Sequence[int], dim: int) -> int | None:
    """The dimension of ``other`` that holds the outer part of dimension ``dim`` of ``shape``."""
    before = math.prod(shape[:dim])
    for place, size in enumerate(other):
        if math.prod(other[:place]) == before and size > 1:
            return place if shape[dim] % size == 0 else None
    return None


def bounds(node: fx.Node, size: int) -> tuple[int, int]:
    """The start and the end of a slice."""
    it = arguments(node)
    begin, end, _ = slice(it["start"], it["end"]).indices(size)
    return begin, end


def dim_of(node: fx.Node) -> int:
    """The ``dim`` of an operation on tensors of one rank."""
    return int(arguments(node)["dim"]) % max(1, len(node.all_input_nodes[0].meta["val"].shape))


def _integers(given: Any) -> list[int]:
    return [int(n) for n in given]
