"""Protects ops and blocks that functionalization would change.

``hide`` rewrites a freshly exported program, ``restore`` the functional graph made from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled

aten = torch.ops.aten


@torch.library.custom_op("piper::dropout", mutates_args=())
def _dropout(x: Tensor, p: float) -> Tensor:
    """Training dropout as one functional op. ``aten.dropout`` may alias its input in evaluation, so
    functionalization rewrites it into an op that rounds differently."""
    return torch.dropout(x, p, True)


@_dropout.register_fake
def _(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x)


BLOCKS = (wrap_with_set_grad_enabled, wrap_with_autocast)


class _Block(nn.Module):
    """The body of a ``no_grad`` or ``autocast`` block, run node by node so that each op keeps its
    own regions. Results of a ``no_grad`` block are detached, so that the block can be inlined."""

    def __init__(self, body: fx.GraphModule, stops_gradient: bool) -> None:
        super().__init__()
        self.body = body
        self._stops_gradient = stops_gradient

    def forward(self, *args: Any) -> Any:
        results = fx.Interpreter(self.body).run(*args)
        if not self._stops_gradient:
            return results
        return tuple(x.detach() if isinstance(x, Tensor) else x for x in results)


def hide(module: fx.GraphModule) -> None:
    """Hide training dropout and grad-mode or autocast blocks from functionalization."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.dropout.default:
            _hide_dropout(node)
        elif node.target in BLOCKS:
            _hide_block(module, node)
    module.recompile()


def restore(graph: fx.Graph) -> None:
    """Turn hidden dropout back into ``aten.dropout``, and make copies differentiable."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.piper.dropout.default:
            node.target = aten.dropout.default
            node.args = (*node.args, True)
        elif node.op == "call_function" and node.target is aten.copy.default:
            _make_differentiable(node)


def _make_differentiable(copy: fx.Node) -> None:
    """Replace ``copy(old, new)``, which autograd lacks, by a clone of ``new`` in the shape and
    dtype of ``old``."""
    old, new = copy.args[:2]
    assert isinstance(old, fx.Node)
    assert isinstance(new, fx.Node)
    like, given = old.meta["val"], new.meta["val"]
    value = new
    with copy.graph.inserting_before(copy):
        if like.dtype != given.dtype:
            value = copy.graph.call_function(aten._to_copy.default, (value,), {"dtype": like.dtype})
            value.meta = {**copy.meta, "val": given.to(like.dtype)}
        if like.shape != given.shape:
            shape = list(like.shape)
            value = copy.graph.call_function(aten.expand.default, (value, shape))
            value.meta = {**copy.meta, "val": copy.meta["val"]}
    copy.target = aten.clone.default
    copy.args = (value,)
    copy.kwargs = {"memory_format": torch.contiguous_format}


def _hide_dropout(node: fx.Node) -> None:
    x, p, train = node.args
    if train and p:
        node.target = torch.ops.piper.dropout.default
        node.args = (x, p)
    else:
        node.replace_all_uses_with(x)  # type: ignore[arg-type]
        node.graph.erase_node(node)


def _hide_block(module: fx.GraphModule, node: fx.Node) -> None:
    get_body = next(arg for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr")
    body = module.get_submodule(str(get_body.target))
    if isinstance(body, _Block):
        return
    assert isinstance(body, fx.GraphModule)
    hide(body)
    stops_gradient = node.target is wrap_with_set_grad_enabled and node.args[0] is False
    setattr(module, str(get_body.target), _Block(body, stops_gradient))
