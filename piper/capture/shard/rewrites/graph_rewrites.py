"""Rewrites a graph before it is sharded: an operation whose parts need different placements becomes
several.

    linear(x, w S(1), b)       linear(x, w S(1)) + b                the bias is added to the sum
    (p1 + b1) + (p2 + b2) + x  (p1 + p2) + b1 + b2 + x              partial sums first, reduced once
    attention(q, k, v), gqa    attention(q, repeat(k), repeat(v))   2 key heads for 4 devices:
                                                                    weights (key_heads.py) or keys
                                                                    and values are repeated
    attention with dropout     its products, and a dropout          see attention_dropout.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.capture.graphs import arguments, called
from piper.capture.operators.head_tail_attention import HEAD_TAIL
from piper.capture.shard.rewrites.attention_dropout import ATTENTION, drops, in_products
from piper.capture.shard.rewrites.key_heads import Wider, wider_heads
from piper.capture.shard.shard_axis import ShardAxis

aten = torch.ops.aten


def rewritten(graph: fx.Graph, given: Sequence[Any], axis: ShardAxis) -> fx.Graph:
    """A rewritten copy of ``graph``; ``given`` are the placements of its arguments."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    placed = dict(zip(graph.find_nodes(op="placeholder"), given, strict=True))
    wider = _wider(graph, placed, axis)
    for node in graph.nodes:
        if node.target is aten.dropout.default and node.args[1] == 0:
            new[node] = new[node.all_input_nodes[0]]
        elif node in wider:
            new[node] = wider[node].again(copy, node, new)
        elif _has_bias(node, placed):
            new[node] = _bias_apart(copy, node, new)
        elif drops(node):
            new[node] = in_products(copy, node, new)
        elif _repeats_heads(node, axis) and node.args[1] not in wider:
            new[node] = _repeated_heads(copy, node, new)
        else:
            new[node] = copy.node_copy(node, new.__getitem__)
    weights = {new[node]: placement for node, placement in placed.items()}
    _add_first(copy, {node for node in copy.nodes if _is_row_product(node, weights)})
    return copy


def _add_first(graph: fx.Graph, partial: set[fx.Node]) -> None:
    """Make sums of several terms add the ``partial`` ones first, in their order, then the others:
    parallel residuals have several partial terms."""
    for node in list(graph.nodes):
        if not _adds(node) or any(_is_term(node, user) for user in node.users):
            continue
        terms = _terms(node)
        first = [x for x in terms if x in partial and _alike(x, node)]
        if len(first) < 2 or any(_value(x).dtype != _value(node).dtype for x in terms):
            continue
        total, *others = [*first, *(x for x in terms if x not in first)]
        for term in others:
            with graph.inserting_before(node):
                total = graph.call_function(aten.add.Tensor, (total, term))
            total.meta = dict(node.meta)
        node.replace_all_uses_with(total)
    graph.eliminate_dead_code()


def _adds(node: fx.Node) -> bool:
    """Whether ``node`` is a sum of two values."""
    return node.target is aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs


def _terms(node: fx.Node) -> list[fx.Node]:
    """The terms of a sum; a term that is itself a sum, with no other reader, is expanded."""
    terms = []
    for x in node.all_input_nodes:
        terms += _terms(x) if _is_term(x, node) else [x]
    return terms


def _is_term(node: fx.Node, of: fx.Node) -> bool:
    """Whether the sum ``node`` is expanded within the sum ``of``."""
    return _adds(node) and _adds(of) and len(node.users) == 1 and _alike(node, of)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = _value(one), _value(other)
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _is_row_product(node: fx.Node, weights: dict[fx.Node, Any]) -> bool:
    """Whether ``node`` is a product without bias whose result is a partial sum."""
    if node.target is aten.linear.default and node.args[2:] in ((), (None,)):
        return weights.get(node.args[1]) == Shard(1)  # type: ignore[arg-type]
    return node.target is aten.mm.default and weights.get(node.args[1]) == Shard(0)  # type: ignore[arg-type]


def _has_bias(node: fx.Node, placed: dict[fx.Node, Any]) -> bool:
    """Whether ``node`` is a product with bias whose result is a partial sum."""
    if node.target is aten.linear.default and len(node.args) == 3 and node.args[2] is not None:
        return placed.get(node.args[1]) == Shard(1)  # type: ignore[arg-type]
    if node.target is aten.addmm.default and not node.kwargs:
        return placed.get(node.args[2]) == Shard(0)  # type: ignore[arg-type]
    return False


def _bias_apart(copy: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    args: Any = node.args
    target, taken, bias = aten.linear.default, args[:2], args[-1]
    if node.target is aten.addmm.default:
        target, taken, bias = aten.mm.default, args[1:], args[0]
    product = called(copy, node, target, *(new[x] for x in taken))
    return called(copy, node, aten.add.Tensor, product, new[bias])


def _wider(graph: fx.Graph, placed: dict[fx.Node, Any], axis: ShardAxis) -> dict[fx.Node, Wider]:
    """The operations that compute repeated key and value heads."""
    wider: dict[fx.Node, Wider] = {}
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        if axis.context is not None or drops(node) or not _repeats_heads(node, axis):
            continue
        times, rest = divmod(axis.ways, heads := _value(node.args[1]).shape[-3])
        if not rest:
            wider |= wider_heads(node, placed, heads, times)
    return wider


def _repeats_heads(node: fx.Node, axis: ShardAxis) -> bool:
    """Whether query heads can be sharded evenly, but not the key and value heads that they
    share."""
    if axis.head_tail:
        return False
    shares = node.target is ATTENTION and node.kwargs.get("enable_gqa")
    if not shares and node.target is not HEAD_TAIL:
        return False
    queries, keys = (_value(x).shape[-3] for x in node.args[:2])
    return queries % axis.ways == 0 and keys % axis.ways != 0


def _repeated_heads(copy: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    """``node`` with keys and values repeated for all query heads, as torch does for
    ``enable_gqa``."""
    it = arguments(node)
    times = _value(it["query"]).shape[-3] // _value(it["key"]).shape[-3]
    repeat = aten.repeat_interleave.self_int
    taken = {x: called(copy, x, repeat, new[x], times, -3) for x in (it["key"], it["value"])}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: taken.get(x) or new[x])
    kwargs = {name: x for name, x in kwargs.items() if name != "enable_gqa"}
    return called(copy, node, node.target, *args, **kwargs)


def _value(x: Any) -> Tensor:
    value: Tensor = x.meta["val"]
    return value
