"""Programs as plain data: every op by its name, every tensor by shape, strides and dtype.

No pickle and no source code: what is read back can only be ops that torch, or a library that the
reader has imported, knows by these names.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from piper.capture.program import Function, Kind, Pass, Program, Ref
from piper.capture.tensors import TensorSpec
from piper.errors import PiperError

Json = Any


def spec_to_json(spec: TensorSpec) -> Json:
    return [list(spec.shape), list(spec.stride), _torch_name(spec.dtype)]


def spec_from_json(data: Json) -> TensorSpec:
    shape, stride, dtype = data
    return TensorSpec(tuple(shape), tuple(stride), getattr(torch, dtype))


def program_to_json(program: Program) -> Json:
    return {
        "functions": {
            which.value: _function_to_json(function)
            for which, function in program.functions.items()
        },
        "specs": [[str(ref), spec_to_json(spec)] for ref, spec in program.specs.items()],
    }


def program_from_json(data: Json, device: torch.device) -> Program:
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    return Program(
        functions={
            Pass(which): _function_from_json(function, mode, device)
            for which, function in data["functions"].items()
        },
        specs={_ref(ref): spec_from_json(spec) for ref, spec in data["specs"]},
    )


def _function_to_json(function: Function) -> Json:
    return {
        "graph": _graph_to_json(function.module.graph),
        "arguments": [str(ref) for ref in function.arguments],
        "results": [str(ref) for ref in function.results],
        "flops": function.flops,
        "moved": [function.moved, function.moved_fused],
        "workspace": function.workspace,
        "random": function.random,
        "consumes": sorted(str(ref) for ref in function.consumes),
    }


def _function_from_json(data: Json, mode: FakeTensorMode, device: torch.device) -> Function:
    return Function(
        module=_graph_from_json(data["graph"], mode, device),
        arguments=tuple(map(_ref, data["arguments"])),
        results=tuple(map(_ref, data["results"])),
        flops=data["flops"],
        moved=data["moved"][0],
        moved_fused=data["moved"][1],
        workspace=data["workspace"],
        random=data["random"],
        consumes=frozenset(map(_ref, data["consumes"])),
    )


def _ref(written: str) -> Ref:
    kind = written.rstrip("0123456789")
    return Ref(Kind(kind), int(written[len(kind) :]))


def _graph_to_json(graph: fx.Graph) -> Json:
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    return [
        [
            node.op,
            node.name,
            _target_name(node),
            _encode(node.args, numbers),
            _encode(dict(node.kwargs), numbers),
            _value_to_json(node.meta.get("val")),
        ]
        for node in graph.nodes
    ]


def _graph_from_json(data: Json, mode: FakeTensorMode, device: torch.device) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for op, name, target, args, kwargs, value in data:
        found = _target(target) if op == "call_function" else target
        node = graph.create_node(op, found, _decode(args, nodes), _decode(kwargs, nodes), name=name)
        if value is not None:
            node.meta["val"] = _value_from_json(value, mode, device)
        nodes.append(node)
    return fx.GraphModule(torch.nn.Module(), graph)


def _target_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if isinstance(node.target, OpOverload):
        return str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    raise PiperError(f"the operation {node.target} cannot be saved: it is no op of a library")


def _target(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    found = _registered(name)
    if found is None and name.startswith("prims."):
        importlib.import_module("torch._inductor.inductor_prims")  # registers Inductor's own
        found = _registered(name)
    if found is None:
        raise PiperError(
            f"the operation {name} is unknown here: import the library that defines it first"
        )
    return found


def _registered(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _encode(item: Any, numbers: dict[fx.Node, int]) -> Json:
    match item:
        case fx.Node():
            return {"node": numbers[item]}
        case list():
            return [_encode(x, numbers) for x in item]
        case tuple():
            return {"tuple": [_encode(x, numbers) for x in item]}
        case dict():
            return {"dict": {key: _encode(x, numbers) for key, x in item.items()}}
        case None | bool() | int() | float() | str():
            return item
        case torch.dtype() | torch.memory_format() | torch.layout():
            return {"torch": _torch_name(item)}
        case torch.device():
            return {"device": item.type}
        case _:
            raise PiperError(f"the argument {item!r} of an operation cannot be saved")


def _torch_name(item: Any) -> str:
    return str(item).removeprefix("torch.")


def _decode(item: Json, nodes: list[fx.Node]) -> Any:
    match item:
        case {"node": number}:
            return nodes[number]
        case {"tuple": items}:
            return tuple(_decode(x, nodes) for x in items)
        case {"dict": items}:
            return {key: _decode(x, nodes) for key, x in items.items()}
        case {"torch": name}:
            return getattr(torch, name)
        case {"device": name}:
            return torch.device(name)
        case list():
            return [_decode(x, nodes) for x in item]
        case _:
            return item


def _value_to_json(value: Any) -> Json:
    if isinstance(value, Tensor):
        return spec_to_json(TensorSpec.of(value))
    if isinstance(value, list | tuple):
        return {"several": [_value_to_json(x) for x in value]}
    return None


def _value_from_json(data: Json, mode: FakeTensorMode, device: torch.device) -> Any:
    if isinstance(data, dict):
        return tuple(
            None if item is None else _value_from_json(item, mode, device)
            for item in data["several"]
        )
    spec = spec_from_json(data)
    with mode:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
