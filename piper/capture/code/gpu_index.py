"""Sets the GPU of a graph: each process has its own GPU, and traces before it knows which."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree


def name_gpu(graph: fx.Graph, where: torch.device) -> None:
    """Replace every GPU that the graph names, which was current at tracing, by ``where``."""
    if where.type != "cuda":
        return

    def named(item: Any) -> Any:
        return where if isinstance(item, torch.device) and item.type == "cuda" else item

    for node in graph.nodes:
        node.args = map_aggregate(node.args, named)
        node.kwargs = map_aggregate(node.kwargs, named)


def make_fakes(graph: fx.Graph, where: torch.device, mode: FakeTensorMode) -> None:
    """Fake tensors on ``where`` in place of the values of a graph from a file."""

    def fake(x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else _like(x, where)

    with mode:
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(Tensor, fake, node.meta["val"])


def move_values(module: fx.GraphModule, where: torch.device) -> None:
    """Move the fake values of a graph to ``where``, a GPU that its ops name."""
    starts = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    fakes = [x for x in starts if isinstance(x, FakeTensor) and x.device.type != "cpu"]
    if where.type != "cuda" or all(x.device == where for x in fakes):
        return
    mode = fakes[0].fake_mode
    with mode:
        moved = [_like(x, where) if any(x is fake for fake in fakes) else x for x in starts]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*moved)


def _like(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
