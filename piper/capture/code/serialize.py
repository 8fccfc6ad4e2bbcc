"""Programs as plain data: every op by its name, every tensor by shape, strides and dtype.

No pickle and no source code: a file can only name operators that torch, or a library imported by
the reader, has registered. Graphs become Python source before they run; only identifiers,
registered operators and plain values of a file get into that source.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from piper.base.codec import decode
from piper.base.errors import PiperError
from piper.base.reading import (
    MalformedError,
    count,
    counts,
    dtype,
    row,
    rows,
    shown,
    string,
    table,
    within,
    wrong,
)
from piper.capture.code.chunk_program import ChunkProgram, Function
from piper.capture.graphs import is_random
from piper.capture.operators.registry import check_arguments, operator_named
from piper.ir.passes import Kind, Pass, Ref
from piper.ir.tensors import TensorSpec

Json = Any


def spec_to_json(spec: TensorSpec) -> Json:
    return [list(spec.shape), list(spec.stride), _torch_name(spec.dtype)]


def spec_from_json(data: Json) -> TensorSpec:
    shape, stride, kind = row(data, 3)
    spec = TensorSpec(counts(shape), counts(stride), dtype(kind))
    if len(spec.shape) != len(spec.stride):
        raise MalformedError(
            f"{shown(data)} has {len(spec.shape)} sizes, {len(spec.stride)} strides"
        )
    if max(spec.nbytes, spec.numel * spec.dtype.itemsize) >= _MOST_BYTES:
        raise MalformedError(f"a tensor of sizes {shown(list(spec.shape))} is too large to exist")
    return spec


def program_to_json(program: ChunkProgram) -> Json:
    return {
        "functions": {
            which.value: _function_to_json(function)
            for which, function in program.functions.items()
        },
        "specs": [[str(ref), spec_to_json(spec)] for ref, spec in program.specs.items()],
    }


def program_from_json(data: Json, device: torch.device) -> ChunkProgram:
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    table(data, ("functions", "specs"))
    specs: dict[Ref, TensorSpec] = {}
    with within("specs"):
        for place, item in enumerate(rows(data["specs"])):
            with within(place):
                ref, spec = row(item, 2)
                if specs.setdefault(_ref(ref), read := spec_from_json(spec)) is not read:
                    raise MalformedError(f"{ref} is there twice")
    functions = {}
    with within("functions"):
        if type(data["functions"]) is not dict or "F" not in data["functions"]:
            raise wrong(data["functions"], "an object with at least the pass F")
        for name, function in data["functions"].items():
            with within(name):
                which = decode(Pass, name)
                functions[which] = _function_from_json(function, specs, mode, device)
    return ChunkProgram(functions, specs)


def _function_to_json(function: Function) -> Json:
    return {
        "graph": _graph_to_json(function.module.graph),
        "arguments": [str(ref) for ref in function.arguments],
        "results": [str(ref) for ref in function.results],
        "flops": function.flops,
        "moved": [function.moved, function.moved_fused],
        "workspace": function.workspace,
        "consumes": sorted(str(ref) for ref in function.consumes),
    }


_FUNCTION = (
    "graph", "arguments", "results", "flops", "moved", "workspace", "consumes"
)  # fmt: skip


def _function_from_json(
    data: Json, specs: Mapping[Ref, TensorSpec], mode: FakeTensorMode, device: torch.device
) -> Function:
    table(data, _FUNCTION)
    ends: dict[str, tuple[Ref, ...]] = {}
    for name in ("arguments", "results", "consumes"):
        with within(name):
            ends[name] = tuple(rows(data[name], _ref))
            if unknown := [ref for ref in ends[name] if ref not in specs]:
                raise MalformedError(f"nothing is said of {unknown[0]} in specs")
            if len(set(ends[name])) != len(ends[name]):
                raise MalformedError("something is there twice")
    with within("consumes"):
        if not set(ends["consumes"]).issubset(ends["arguments"]):
            raise MalformedError("what is consumed must be among the arguments")
    with within("graph"):
        module = _graph_from_json(data["graph"], mode, device)
        _check_ends(module.graph, ends["arguments"], ends["results"], specs)
    with within("moved"):
        moved, fused = map(count, row(data["moved"], 2))
    with within("flops or workspace"):
        flops, workspace = count(data["flops"]), count(data["workspace"])
    return Function(
        module=module,
        arguments=ends["arguments"],
        results=ends["results"],
        flops=flops,
        moved=moved,
        moved_fused=fused,
        workspace=workspace,
        random=any(is_random(node) for node in module.graph.nodes),
        consumes=frozenset(ends["consumes"]),
    )


def _check_ends(
    graph: fx.Graph,
    arguments: tuple[Ref, ...],
    results: tuple[Ref, ...],
    specs: Mapping[Ref, TensorSpec],
) -> None:
    """Check that a graph's arguments and results agree with ``specs``."""
    taken = graph.find_nodes(op="placeholder")
    made = graph.output_node().args[0]
    assert isinstance(made, list | tuple)
    for what, refs, nodes in (("arguments", arguments, taken), ("results", results, made)):
        if len(refs) != len(nodes):
            raise MalformedError(f"it has {len(nodes)} {what}, but {len(refs)} are named")
        for ref, node in zip(refs, nodes, strict=True):
            value = node.meta.get("val") if isinstance(node, fx.Node) else None
            if not isinstance(value, Tensor) or TensorSpec.of(value) != specs[ref]:
                raise MalformedError(f"its {what} disagree with specs about {ref}")


_REF = re.compile(r"([a-z_]+)(0|[1-9]\d{0,8})(?:\+([1-9]\d{0,8}))?", re.ASCII)
_KINDS = {kind.value: kind for kind in Kind}


def _ref(written: Json) -> Ref:
    match = _REF.fullmatch(string(written))
    if match is None or match[1] not in _KINDS:
        raise wrong(written, f"a kind of tensor and a number: {', '.join(_KINDS)}")
    return Ref(_KINDS[match[1]], int(match[2]), int(match[3] or 0))


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
    seen: set[str] = set()
    last = len(rows(data)) - 1
    for place, item in enumerate(data):
        try:
            op, name, target, args, kwargs, value = row(item, 6)
            if (op == "output") != (place == last):
                raise MalformedError("the output, and nothing else, comes at the end of a graph")
            if op == "placeholder" and nodes and nodes[-1].op != "placeholder":
                raise MalformedError("an argument after the first operation")
            if _identifier(name) in seen:
                raise MalformedError(f"{name} is there twice")
            seen.add(name)
            node = _node_from_json(graph, op, name, target, args, kwargs, nodes)
            if value is not None:
                node.meta["val"] = _value_from_json(value, mode, device)
        except MalformedError as error:
            error.at.append(f"[{place}]")
            raise
        nodes.append(node)
    if not nodes:
        raise MalformedError("a graph has at least an output")
    return fx.GraphModule(torch.nn.Module(), graph)


def _node_from_json(
    graph: fx.Graph,
    op: Json,
    name: str,
    target: Json,
    args: Json,
    kwargs: Json,
    nodes: list[fx.Node],
) -> fx.Node:
    given, named = _decode(args, nodes), _decode_keywords(kwargs, nodes)
    if not isinstance(given, tuple):
        raise wrong(args, "a tuple of arguments")
    match op:
        case "placeholder":
            if given or named:
                raise MalformedError(f"the argument {name} of a graph has no default")
            return graph.create_node("placeholder", _identifier(target), name=name)
        case "output":
            rows_of_nodes = len(given) == 1 and isinstance(given[0], list | tuple)
            if named or not rows_of_nodes or target != "output":
                raise MalformedError("an output is a list of what operations made")
            return graph.create_node("output", "output", given, name=name)
        case "call_function" if target == "getitem":
            whole = len(given) == 2 and isinstance(given[0], fx.Node) and type(given[1]) is int
            if named or not whole:
                raise MalformedError("getitem takes one of several results by its number")
            return graph.create_node("call_function", operator.getitem, given, name=name)
        case "call_function":
            overload = operator_named(string(target))
            check_arguments(overload, given, named)
            return graph.create_node("call_function", overload, given, named, name=name)
        case _:
            raise wrong(op, "placeholder, call_function or output")


def _identifier(name: Json) -> str:
    """``name``, if it is safe in Python source: an identifier without leading ``__``, no
    keyword."""
    if type(name) is not str or not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise wrong(name, "a name of letters, digits and underscores")
    return name


_NAME = re.compile(r"(?!__)[A-Za-z_]\w{0,199}", re.ASCII)
_MOST_BYTES = 2**62


def _target_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if isinstance(node.target, OpOverload):
        return str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    raise PiperError(f"the operation {node.target} cannot be saved: it is no op of a library")


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
        case complex():
            return {"complex": [item.real, item.imag]}
        case _:
            raise PiperError(f"the argument {item!r} of an operation cannot be saved")


def _torch_name(item: Any) -> str:
    return str(item).removeprefix("torch.")


def _decode(item: Json, nodes: list[fx.Node], depth: int = 0) -> Any:
    if depth > _DEPTH:
        raise MalformedError("an argument is nested too deeply")
    match item:
        case {"node": number} if len(item) == 1:
            if type(number) is not int or not 0 <= number < len(nodes):
                raise MalformedError(f"{shown(number)} is not the number of a node before this one")
            return nodes[number]
        case {"tuple": list(items)} if len(item) == 1:
            return tuple(_decode(x, nodes, depth + 1) for x in items)
        case {"torch": name} if len(item) == 1:
            if type(name) is not str or name not in _CONSTANTS:
                raise wrong(name, "a dtype, layout or memory format of torch's")
            return _CONSTANTS[name]
        case {"device": name} if len(item) == 1:
            return device_named(name)
        case {"complex": [float(real), float(imaginary)]} if len(item) == 1:
            return complex(real, imaginary)
        case list():
            return [_decode(x, nodes, depth + 1) for x in item]
        case bool() | float() | str() | None:
            return item
        case int():
            return count(item) if item >= 0 else -count(-item)
        case _:
            raise wrong(item, "an argument of an operation")


def _decode_keywords(item: Json, nodes: list[fx.Node]) -> dict[str, Any]:
    match item:
        case {"dict": dict(items)} if len(item) == 1:
            return {_identifier(key): _decode(x, nodes) for key, x in items.items()}
        case _:
            raise wrong(item, "an object of arguments by name")


def device_named(name: Json) -> torch.device:
    if name not in ("cpu", "cuda", "meta", "mps", "xpu"):
        raise wrong(name, "a kind of device, such as cpu or cuda")
    return torch.device(name)


_DEPTH = 4
_CONSTANTS: Mapping[str, torch.dtype | torch.layout | torch.memory_format] = {
    name: item
    for name, item in vars(torch).items()
    if isinstance(item, torch.dtype | torch.layout | torch.memory_format)
}


def _value_to_json(value: Any) -> Json:
    if isinstance(value, Tensor):
        return spec_to_json(TensorSpec.of(value))
    if isinstance(value, list | tuple):
        return {"several": [_value_to_json(x) for x in value]}
    return None


def _value_from_json(data: Json, mode: FakeTensorMode, device: torch.device) -> Any:
    if isinstance(data, dict):
        table(data, ("several",))
        values = []
        for item in rows(data["several"]):
            if isinstance(item, dict):
                raise wrong(item, "a tensor's sizes, strides and dtype, or null")
            values.append(None if item is None else _value_from_json(item, mode, device))
        return tuple(values)
    spec = spec_from_json(data)
    with mode:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
