"""Graphs are traced before a process knows its GPU. The tests use fake tensors and need no GPU."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from piper.capture.code.gpu_index import move_values, name_gpu

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def traced() -> fx.GraphModule:
    def masked(x: Tensor, on_host: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return torch.where(places > 2, x, torch.zeros((), device=x.device)) + on_host

    with FakeTensorMode():
        x, on_host = torch.empty_strided((4, 6), (1, 4), device=FIRST), torch.empty(())
    module = make_fx(masked, tracing_mode="fake")(x, on_host)
    for node, value in zip(module.graph.find_nodes(op="placeholder"), (x, on_host), strict=True):
        node.meta["val"] = value
    return module


def test_the_gpu_of_the_process_is_named() -> None:
    module = traced()
    named = {x for node in module.graph.nodes for x in node.kwargs.values()}
    assert FIRST in named
    name_gpu(module.graph, SECOND)
    named = {x for node in module.graph.nodes for x in node.kwargs.values()}
    assert SECOND in named
    assert FIRST not in named


def test_values_move_to_the_gpu_of_the_process() -> None:
    module = traced()
    name_gpu(module.graph, SECOND)
    move_values(module, SECOND)
    x, on_host, *others = [n.meta["val"] for n in module.graph.nodes if n.op != "output"]
    assert (x.device, x.stride()) == (SECOND, (1, 4))
    assert on_host.device == torch.device("cpu")
    assert {value.device for value in others} == {SECOND}


def test_without_a_gpu_nothing_changes() -> None:
    module = traced()
    before = module.code
    name_gpu(module.graph, CPU)
    move_values(module, CPU)
    module.recompile()
    assert module.code == before
