"""What is written otherwise in a graph before it is sharded, since its parts are sharded otherwise
than the whole.

    linear(x, w S(1), b)       linear(x, w S(1)) + b                the bias is added to the sum
    attention(q, k, v), gqa    attention(q, repeat(k), repeat(v))   2 heads of k for 4 devices
    attention with dropout     its products, and a dropout          see dropped_attention.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.capture.dropped_attention import ATTENTION, drops, in_products
from piper.capture.head_tail import HEAD_TAIL
from piper.capture.shard_axis import ShardAxis

aten = torch.ops.aten


def rewritten(graph: fx.Graph, given: Sequence[Any], axis: ShardAxis) -> fx.Graph:
    """A copy of ``graph``, whose arguments are placed as ``given`` says."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    placed = dict(zip(graph.find_nodes(op="placeholder"), given, strict=True))
    for node in graph.nodes:
        if _is_row_product(node, placed):
            new[node] = _bias_apart(copy, node, new)
        elif drops(node):
            new[node] = in_products(copy, node, new)
        elif not axis.head_tail and _has_few_heads(node, axis.ways):
            new[node] = _repeated_heads(copy, node, new)
        else:
            new[node] = copy.node_copy(node, new.__getitem__)
    return copy


def _is_row_product(node: fx.Node, placed: dict[fx.Node, Any]) -> bool:
    """Whether a bias is added within a product that is a partial sum."""
    if node.target is aten.linear.default and len(node.args) == 3 and node.args[2] is not None:
        return placed.get(node.args[1]) == Shard(1)  # type: ignore[arg-type]
    if node.target is aten.addmm.default and not node.kwargs:
        return placed.get(node.args[2]) == Shard(0)  # type: ignore[arg-type]
    return False


def _bias_apart(copy: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    target: Any = aten.linear.default
    args, bias = list(node.args[:2]), node.args[-1]
    if node.target is aten.addmm.default:
        target, args, bias = aten.mm.default, list(node.args[1:]), node.args[0]
    taken = [new[x] for x in args]  # type: ignore[index]
    product = copy.call_function(target, tuple(taken))
    product.meta = dict(node.meta)
    total = copy.call_function(aten.add.Tensor, (product, new[bias]))  # type: ignore[index]
    total.meta = dict(node.meta)
    return total


def _has_few_heads(node: fx.Node, ways: int) -> bool:
    """Whether heads of keys and values that several heads of queries share are too few to be
    sharded."""
    shares = node.target is ATTENTION and node.kwargs.get("enable_gqa")
    if not shares and node.target is not HEAD_TAIL:
        return False
    queries, keys = (_value(x).shape[-3] for x in node.args[:2])
    return queries % ways == 0 and keys % ways != 0


def _repeated_heads(copy: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    """As torch does for ``enable_gqa``."""
    query, key, value = node.args[:3]
    times = _value(query).shape[-3] // _value(key).shape[-3]
    repeated = []
    for x in (key, value):
        assert isinstance(x, fx.Node)
        fake = _value(x)
        with fake.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            wider = fake.repeat_interleave(times, -3)
        more = copy.call_function(aten.repeat_interleave.self_int, (new[x], times, -3))
        more.meta = {**x.meta, "val": wider}
        repeated.append(more)
    others = fx.node.map_arg(node.args[3:], new.__getitem__)
    kwargs = {k: v for k, v in node.kwargs.items() if k != "enable_gqa"}
    found = copy.call_function(
        node.target,  # type: ignore[arg-type]
        (new[query], *repeated, *others),  # type: ignore[index]
        fx.node.map_arg(kwargs, new.__getitem__),
    )
    found.meta = dict(node.meta)
    return found


def _value(x: Any) -> Tensor:
    found: Tensor = x.meta["val"]
    return found
