"""Keeps the strides of a graph's results the same across a compiler's passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.graphs import called

aten = torch.ops.aten
Strides = list[tuple[int, ...] | None]


def strides_of(graph: fx.Graph) -> Strides:
    """The strides of each result; None if it is not a tensor."""
    results: Any = graph.output_node().args[0]
    values = [node.meta["val"] if isinstance(node, fx.Node) else None for node in results]
    return [x.stride() if isinstance(x, Tensor) else None for x in values]


def keep_strides(graph: fx.Graph, wanted: Strides) -> None:
    """Copy each result whose strides differ from ``wanted``: the chunks that read it were traced
    with these. For example, a product that is padded for speed is a slice of a wider one."""
    end = graph.output_node()
    given: Any = end.args[0]
    results = list(given)
    for i, (present, strides) in enumerate(zip(strides_of(graph), wanted, strict=True)):
        if strides is None or present == strides:
            continue
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        back = sorted(range(len(order)), key=order.__getitem__)
        with graph.inserting_before(end):
            contiguous = torch.contiguous_format
            turned = called(graph, results[i], aten.permute.default, results[i], order)
            copy = called(graph, turned, aten.clone.default, turned, memory_format=contiguous)
            results[i] = called(graph, copy, aten.permute.default, copy, back)
    end.args = (results,)
