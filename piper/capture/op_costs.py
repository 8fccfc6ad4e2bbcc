"""The FLOPs, memory traffic and product shapes of the operations of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import flop_counter

from piper.capture.graphs import arguments, base_of, made_by, nbytes_of, operations, returned
from piper.ir.dag.facts import OpCost, PassCost

_ATEN = torch.ops.aten
_FORWARD = _ATEN._scaled_dot_product_flash_attention
_BACKWARD = _ATEN._scaled_dot_product_flash_attention_backward
_ATTENTION = {
    _ATEN._scaled_dot_product_efficient_attention: _FORWARD,
    _ATEN._scaled_dot_product_flash_attention: _FORWARD,
    _ATEN._scaled_dot_product_cudnn_attention: _FORWARD,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _FORWARD,
    _ATEN._scaled_dot_product_efficient_attention_backward: _BACKWARD,
    _ATEN._scaled_dot_product_flash_attention_backward: _BACKWARD,
    _ATEN._scaled_dot_product_cudnn_attention_backward: _BACKWARD,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _BACKWARD,
}
"""The attention op whose FLOP formula counts each one: torch has no formula for CPU attention."""
_PRODUCTS = {_ATEN.mm: 0, _ATEN.bmm: 0, _ATEN.addmm: 1, _ATEN.baddbmm: 1}
"""The index of the first matrix among the arguments of each product."""


def pass_cost(graph: fx.Graph) -> PassCost:
    """The operations of a graph but views, each a kernel of its own."""
    counts: Counter[tuple[int, int, tuple[int, ...], int]] = Counter()
    for node in operations(graph):
        if base_of(node) is not node:
            continue
        made, unused = made_by(node)
        read = sum(map(nbytes_of, set(node.all_input_nodes)))
        flops = node_flops(node)
        causal = bool(flops) and arguments(node).get("is_causal") is True
        key = flops, sum(made.values()) + unused + read, _product(node), causal * flops // 2
        counts[key] += 1
    ends = {*returned(graph), *graph.find_nodes(op="placeholder")}
    return PassCost(
        tuple(OpCost(count, *of) for of, count in counts.items() if any(of[:2])),
        sum(map(nbytes_of, ends)),
    )


def node_flops(node: fx.Node) -> int:
    """FLOPs of one op; 0 if torch has no formula."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    formula = flop_counter.flop_registry.get(_ATTENTION.get(packet, packet))
    if formula is None:
        return 0
    values: Any = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    args, kwargs = values
    if packet in _ATTENTION:
        args = _heads_of_queries(node, args)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _product(node: fx.Node) -> tuple[int, ...]:
    """(m, n, k) of a matrix product; empty for other operations."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    if packet in _PRODUCTS:
        first, second = (_shape(arg) for arg in node.args[_PRODUCTS[packet] :][:2])
        *rows, k = first
        return torch.Size(rows).numel(), second[-1], k
    if packet is torch.ops.piper.grouped_mm:
        (rows_, k), (_, _, n) = map(_shape, node.args[:2])
        return rows_, n, k
    if packet is torch.ops.piper.grouped_outer:
        (rows_, m), (_, n), (groups,) = map(_shape, node.args[:3])
        return groups * m, n, max(1, rows_ // groups)
    return ()


def _shape(arg: Any) -> torch.Size:
    value = arg.meta["val"]
    assert isinstance(value, Tensor)
    return value.shape


def _heads_of_queries(node: fx.Node, args: Sequence[Any]) -> list[Any]:
    """Attention's arguments, with keys and values repeated to the query heads: not all versions of
    torch count grouped heads."""
    assert isinstance(node.target, OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    heads = args[names.index("query")].shape[1]
    return [
        torch.empty(x.shape[0], heads, *x.shape[2:], device="meta")
        if name in ("key", "value")
        else x
        for name, x in zip(names, args, strict=False)
    ]
