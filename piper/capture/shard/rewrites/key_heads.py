"""Grouped-query attention with fewer key and value heads than devices: each device computes the
head that its queries need, as several others do, and no activation is communicated for it.

    k = linear(x, w [2 heads])     device 0 of 4 has head 0, device 1 has head 0, 2 and 3 head 1

The weights are repeated, head by head, to one head for each device, and so are the values computed
with them up to the attention. A device with a shard of a weight first gathers the weight, if that
is fewer bytes than redistributing keys and values. A device with a whole weight selects its head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.capture.shard.placements import REPLICATED
from piper.capture.shard.rewrites.table import Form, Share, rewrite
from piper.capture.shard.rewrites.views import VIEWS
from piper.capture.shard.shard_axis import ShardAxis

aten = torch.ops.aten
_EACH_HEAD = (
    *VIEWS,
    aten.transpose.int,
    aten.permute.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.unsqueeze.default,
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.neg.default,
    aten.slice.Tensor,
    aten.cat.default,
    aten.pow.Tensor_Scalar,
    aten.mean.dim,
    aten.rsqrt.default,
    aten.rms_norm.default,
)
"""Operations that compute each head by itself, as long as heads stay a dimension of the result. No
operation that rounds: gradients of equal heads are summed after it, and would be rounded one by
one."""


@dataclass(frozen=True, slots=True)
class KeyHeads:
    """The number of key heads, and how often each is repeated."""

    heads: int
    times: int


@dataclass(frozen=True, slots=True)
class Wider:
    """An operation whose result has repeated heads."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor
    heads: KeyHeads
    repeated: tuple[fx.Node, ...] = ()
    """Parameters that it reads with repeated heads."""


def repeated_heads(parameter: Tensor, heads: int, times: int) -> Tensor:
    """A parameter, with heads along dimension 0, with each head repeated ``times`` times."""
    apart = parameter.unflatten(0, (heads, -1))
    return apart.repeat_interleave(times, 0).flatten(0, 1)


def wider_heads(
    attention: fx.Node, placed: Mapping[fx.Node, Any], how: KeyHeads
) -> dict[fx.Node, Wider]:
    """The operations from the weights of keys and values to ``attention``, with repeated heads;
    empty if keys or values are computed in another way, or if this would send more bytes."""
    operations: dict[fx.Node, Wider] = {}
    query, *ends = attention.args[:3]
    ways, exchanged, gathered = how.heads * how.times, 0, 0
    for end in ends:
        assert isinstance(end, fx.Node)
        path = _path(attention, end)
        wider = _widened(path, placed, how) if path else {}
        if not wider or wider[end].value.shape[-3] != ways:
            return {}
        shared = query.meta["val"].shape[-3] // how.heads  # type: ignore[union-attr]
        exchanged += _nbytes(end) * (1 + shared)  # before and after repetition for the queries
        sharded = [x for x in wider[path[0]].repeated if placed[x] != REPLICATED]
        gathered += sum(map(_nbytes, sharded)) * (ways - 1)
        operations |= wider
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


def _widened(
    path: list[fx.Node], placed: Mapping[fx.Node, Any], how: KeyHeads
) -> dict[fx.Node, Wider]:
    first, *others = path
    parameters = tuple(x for x in first.args[1:] if isinstance(x, fx.Node))
    fits = all(
        placed.get(x) in (REPLICATED, Shard(0)) and x.meta["val"].shape[0] % how.heads == 0
        for x in parameters
    )
    if not fits:
        return {}
    fake = first.meta["val"]
    with fake.fake_mode, torch.no_grad():
        wide = fake.repeat_interleave(how.times, -1)
        operations = {
            first: Wider(first.target, first.args, dict(first.kwargs), wide, how, parameters)
        }
        for node in others:
            wider = _again(node, operations, how)
            if wider is None:
                return {}
            operations[node] = wider
    return operations


def _again(node: fx.Node, wider: Mapping[fx.Node, Wider], how: KeyHeads) -> Wider | None:
    """``node`` with repeated heads; None if it does not compute each head by itself."""
    if node.target not in _EACH_HEAD:
        return None
    target, args, kwargs = node.target, node.args, dict(node.kwargs)
    if target in VIEWS:
        (source,) = node.all_input_nodes
        shape = _viewed(source, node, wider[source].value, how)
        if shape is None:
            return None
        target, args, kwargs = aten.reshape.default, (source, shape), {}
    fakes = fx.node.map_arg(
        (args, kwargs), lambda x: wider[x].value if x in wider else x.meta["val"]
    )
    try:
        value = target(*fakes[0], **fakes[1])
    except RuntimeError:  # its other argument has a dimension of heads too
        return None
    return (
        Wider(target, args, kwargs, value, how)
        if _grown(node, value, how.times) is not None
        else None
    )


def _grown(node: fx.Node, value: Tensor, times: int) -> int | None:
    """The dimension of the heads: the only one that is larger, by a factor of ``times``."""
    shape, larger = node.meta["val"].shape, value.shape
    if len(shape) != len(larger):
        return None
    dims = [d for d, (a, b) in enumerate(zip(shape, larger, strict=True)) if a != b]
    return dims[0] if len(dims) == 1 and larger[dims[0]] == times * shape[dims[0]] else None


def _viewed(source: fx.Node, node: fx.Node, wide: Tensor, how: KeyHeads) -> list[int] | None:
    """The shape of a view with repeated heads, if they are the outermost factor of a dimension."""
    dim = _grown(source, wide, how.times)
    before = math.prod(wide.shape[:dim])
    shape = list(node.meta["val"].shape)
    for at, size in enumerate(shape):
        if math.prod(shape[:at]) == before and size % how.heads == 0:
            return [*shape[:at], size * how.times, *shape[at + 1 :]]
    return None


def _nbytes(node: fx.Node) -> int:
    value: Tensor = node.meta["val"]
    return value.numel() * value.dtype.itemsize


@rewrite(repeated_heads)
def own_head(node: fx.Node, placed: Mapping[fx.Node, Any], axis: ShardAxis) -> Form | None:
    """A device selects its head from the whole parameter."""
    parameter, heads, times = node.args
    assert isinstance(parameter, fx.Node)
    shape = list(parameter.meta["val"].shape)

    def emit(share: Share) -> fx.Node:
        apart = share.call(aten.reshape.default, share.read(parameter), [heads, -1, *shape[1:]])
        first = share.call(aten.floor_divide.default, share.rank(), times)
        index = share.call(aten.unsqueeze.default, first, 0)
        head = share.call(aten.index_select.default, apart, 0, index)
        return share.call(aten.squeeze.dim, head, 0)

    return Form({parameter: REPLICATED}, Shard(0), emit, fixed=True)
