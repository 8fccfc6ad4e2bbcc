"""While a model is traced, and in what was traced, grouped products are those of ``grouped.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from piper.capture.operators.grouped_mm import GROUPED_MM, grouped_mm


class OurProducts(TorchFunctionMode):
    """While a model is traced, products of rows sorted by expert are ours: torch's own have shapes
    in few dtypes."""

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
                made = grouped_mm(x, weight, offsets)
                return made if bias is None else made + bias
        return func(*args, **given)


_PRODUCTS = (torch._grouped_mm, getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm))
_NAMES = ("offs", "bias", "out_dtype")


def use_ours(graph: fx.Graph) -> None:
    """Let products of rows sorted by expert that ``transformers`` makes for tracing be ours."""
    for node in graph.nodes:
        if str(node.target) == "transformers.grouped_mm_fallback.default":
            node.target, node.kwargs = GROUPED_MM, {}
