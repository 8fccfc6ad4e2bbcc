"""Puts Piper's operators in place of torch's functions in a traced model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from piper.capture.intercept.bincount import bincount
from piper.capture.operators.grouped_mm import GROUPED_MM, grouped_mm


class OwnOperators(TorchFunctionMode):
    """While active, torch's functions of ``_OWN`` become Piper's operators, where these can stand
    for them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        own = _OWN[func](*args, **given) if func in _OWN else NotImplemented
        return func(*args, **given) if own is NotImplemented else own


def _counts(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Exactly ``minlength`` counts."""
    return NotImplemented if weights is not None or minlength <= 0 else bincount(input, minlength)


def _product(
    x: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """A product of rows sorted by expert: torch can trace its own in few dtypes only."""
    if (x.dim(), weight.dim()) != (2, 3) or offs is None or out_dtype not in (None, x.dtype):
        return NotImplemented
    product = grouped_mm(x, weight, offs)
    return product if bias is None else product + bias


_OWN: Mapping[Any, Callable[..., Any]] = {
    torch.bincount: _counts,
    Tensor.bincount: _counts,
    torch._grouped_mm: _product,
    getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm): _product,
}


def use_ours(graph: fx.Graph) -> None:
    """Replace the grouped product that ``transformers`` uses for tracing by ``grouped_mm``."""
    for node in graph.nodes:
        if str(node.target) == "transformers.grouped_mm_fallback.default":
            node.target, node.kwargs = GROUPED_MM, {}
