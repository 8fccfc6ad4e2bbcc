"""Traced attention of ``transformers`` becomes the call that the same model makes eagerly.

When traced, the library materializes a causal mask and repeats shared key and value heads. When run
eagerly, it passes ``is_causal`` and ``enable_gqa`` instead. The mask does not depend on data, so it
is evaluated here and the eager call restored. Results equal the eager ones, and kernels skip the
masked half.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from piper.capture.graphs import ancestors, arguments, extract, is_random, named_device

aten = torch.ops.aten
_LIBRARY = "transformers."
_LARGEST = 1 << 28  # elements; a larger mask is not evaluated and stays as it is


def restore_eager_attention(graph: fx.Graph) -> None:
    """Replace constant causal masks in the attention of transformers by ``is_causal=True``."""
    causal: dict[fx.Node, bool] = {}
    target = aten.scaled_dot_product_attention.default
    for node in graph.find_nodes(op="call_function", target=target):
        mask = arguments(node)["attn_mask"]
        if not isinstance(mask, fx.Node) or not _from_library(node):
            continue
        if mask not in causal:
            causal[mask] = _is_causal(mask)
        if causal[mask]:
            _call_causal(node)
    graph.eliminate_dead_code()


def _from_library(node: fx.Node) -> bool:
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    return bool(modules) and str(modules[-1][1]).startswith(_LIBRARY)


def _call_causal(node: fx.Node) -> None:
    query, key, value = node.args[:3]
    dropout = arguments(node)["dropout_p"]
    dropped = ("attn_mask", "dropout_p", "is_causal")
    kwargs = {k: v for k, v in node.kwargs.items() if k not in dropped}
    shared = (_unrepeated(key), _unrepeated(value))
    if all(shared):
        key, value = shared
        kwargs["enable_gqa"] = True
    node.args = (query, key, value, None, dropout, True)
    node.kwargs = kwargs


def _unrepeated(node: object) -> fx.Node | None:
    """``x`` if ``node`` repeats its heads: ``x[:, :, None].expand(...).reshape(...)``."""
    chain = (
        (aten._unsafe_view.default, aten.view.default),
        (aten.clone.default,),
        (aten.expand.default,),
        (aten.unsqueeze.default,),
    )
    for targets in chain:
        if not isinstance(node, fx.Node):
            return None
        if node.target in targets:
            last, node = node, node.args[0]
        elif targets != (aten.clone.default,):
            return None
    return node if isinstance(node, fx.Node) and last.args[1] == 2 else None


def _is_causal(mask: fx.Node) -> bool:
    shape = mask.meta["val"].shape
    if len(shape) < 2 or shape[-1] != shape[-2] or shape.numel() > _LARGEST:
        return False
    value = _evaluate(mask)
    if value is None:
        return False
    below = torch.ones(shape[-2:], dtype=torch.bool).tril()
    if value.dtype is torch.bool:
        return bool((value == below).all())
    lowest = torch.finfo(value.dtype).min
    return bool(torch.where(below, value == 0, value <= lowest).all())


def _evaluate(target: fx.Node) -> Tensor | None:
    """The value of a node that depends on no placeholder, computed on the CPU; else None."""
    if any(x.op != "call_function" or is_random(x) for x in ancestors([target], ())):
        return None
    module = named_device(extract(target.graph, [], [target]), torch.device("cpu"))
    (result,) = module()
    return result if isinstance(result, Tensor) else None
