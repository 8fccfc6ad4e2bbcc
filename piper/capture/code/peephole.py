"""Peephole rewrites of pure graphs that run op by op; results stay the same bit for bit.

Ops that change no bit of any result are left out. Matrix products that are results can be written
into tensors of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

_ATEN = torch.ops.aten


def leave_out(graph: fx.Graph) -> None:
    """Remove ops that change no bit of any result: transposes that undo each other; first powers,
    as in the gradient of a square. Divide an expanded number before it is expanded, as in the
    gradient of a mean."""
    for node in graph.find_nodes(op="call_function", target=_ATEN.t.default):
        (inner,) = node.args
        if isinstance(inner, fx.Node) and inner.target is _ATEN.t.default:
            _use_instead(node, inner.args[0])
    for node in graph.find_nodes(op="call_function", target=_ATEN.pow.Tensor_Scalar):
        base, exponent = node.args
        if exponent == 1 and _form(base) == _form(node):
            _use_instead(node, base)
    for node in graph.find_nodes(op="call_function", target=_ATEN.div.Scalar):
        wide, divisor = node.args
        if wide.target is _ATEN.expand.default and all(map(_looks_at_values, node.users)):
            with graph.inserting_before(node):
                divided = graph.call_function(_ATEN.div.Scalar, (wide.args[0], divisor))
                again = graph.call_function(_ATEN.expand.default, (divided, *wide.args[1:]))
            again.meta = wide.meta
            node.replace_all_uses_with(again)
    graph.eliminate_dead_code()


def _form(node: fx.Node) -> tuple[torch.dtype, tuple[int, ...]]:
    return node.meta["val"].dtype, node.meta["val"].stride()


def _looks_at_values(node: fx.Node) -> bool:
    """Whether a node makes the same result from an expanded argument as from a contiguous one. With
    another argument that is not contiguous, the result's strides, and so the order of later sums,
    would change."""
    if node.target not in (_ATEN.add.Tensor, _ATEN.mul.Tensor, _ATEN.sub.Tensor):
        return False
    return all(given.meta["val"].is_contiguous() for given in node.all_input_nodes)


def _use_instead(node: fx.Node, other: Any) -> None:
    """Replace ``node`` by ``other``, except in results, which stay tensors of their own."""
    node.replace_all_uses_with(other, lambda user: user.op != "output")


def products_of(graph: fx.Graph) -> dict[int, fx.Node]:
    """Results that are matrix products with no other use, by result index."""
    (results,) = graph.output_node().args
    assert isinstance(results, (list, tuple))
    products: dict[int, fx.Node] = {}
    for place, result in enumerate(results):
        node = result
        while _is(node, _ATEN.t.default) and _is(node.args[0], _ATEN.t.default):
            node = node.args[0].args[0]
        if _is(node, _ATEN.mm.default) and results.count(result) == 1:
            products[place] = node
    return products


def _is(node: Any, target: OpOverload) -> bool:
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1


def write_into(graph: fx.Graph, places: Sequence[int]) -> None:
    """Make the products at ``places`` write into tensors that are passed last."""
    output = graph.output_node()
    (results,) = output.args
    assert isinstance(results, (list, tuple))
    products, chosen = products_of(graph), list(results)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for place in places:
        with graph.inserting_before(first):
            given = graph.placeholder(f"into_{place}")
        products[place].update_kwarg("out", given)
        chosen[place] = products[place]
    output.args = (chosen,)
