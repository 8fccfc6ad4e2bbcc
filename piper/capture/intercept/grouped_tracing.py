"""Replaces grouped matrix products by those of ``operators/grouped_mm.py``, in a traced model."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from piper.capture.operators.grouped_mm import GROUPED_MM, grouped_mm


class OurProducts(TorchFunctionMode):
    """While active, torch's products of rows sorted by expert become Piper's ``grouped_mm``: torch
    can trace its own in few dtypes only."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _PRODUCTS:
            x, weight, *rest = args
            named = dict(zip(_NAMES, rest, strict=False)) | given
            offsets, bias, dtype = (named.get(name) for name in _NAMES)
            same = dtype is None or dtype == x.dtype
            if (x.dim(), weight.dim()) == (2, 3) and offsets is not None and same:
                product = grouped_mm(x, weight, offsets)
                return product if bias is None else product + bias
        return func(*args, **given)


_PRODUCTS = (torch._grouped_mm, getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm))
_NAMES = ("offs", "bias", "out_dtype")


def use_ours(graph: fx.Graph) -> None:
    """Replace the grouped product that ``transformers`` uses for tracing by ``grouped_mm``."""
    for node in graph.nodes:
        if str(node.target) == "transformers.grouped_mm_fallback.default":
            node.target, node.kwargs = GROUPED_MM, {}
