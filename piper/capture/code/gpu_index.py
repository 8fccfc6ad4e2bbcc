"""Sets the GPU of a graph: each process has its own GPU, and traces before it knows which."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp


def gpu_for(graph: fx.Graph) -> torch.device | None:
    """The current GPU of this process, if the graph runs on a GPU."""
    values = (node.meta.get("val") for node in graph.nodes)
    if not any(isinstance(x, Tensor) and x.device.type == "cuda" for x in values):
        return None
    return torch.device("cuda", torch.cuda.current_device())


def name_gpu(graph: fx.Graph, gpu: torch.device | None) -> None:
    """Replace every GPU that the graph names, which was current at tracing, by ``gpu``."""
    if gpu is None:
        return

    def named(item: Any) -> Any:
        return gpu if isinstance(item, torch.device) and item.type == gpu.type else item

    for node in graph.nodes:
        node.args = map_aggregate(node.args, named)
        node.kwargs = map_aggregate(node.kwargs, named)


def move_values(module: fx.GraphModule, gpu: torch.device | None) -> None:
    """Move the fake values of a graph to ``gpu``, which its ops name."""
    starts = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    fakes = [x for x in starts if isinstance(x, FakeTensor) and x.device.type != "cpu"]
    if gpu is None or all(x.device == gpu for x in fakes):
        return
    mode = fakes[0].fake_mode
    with mode:
        moved = [_like(x, gpu) if any(x is fake for fake in fakes) else x for x in starts]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*moved)


def _like(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
