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
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from piper.base.codec import ArrayRecord, Count, decode, encode, picked
from piper.base.errors import PiperError
from piper.base.reading import MalformedError, shown, torch_name, within, wrong
from piper.capture.code.chunk_program import ChunkProgram, Function
from piper.capture.graphs import is_random, module_of
from piper.capture.operators.registry import check_arguments, operator_named
from piper.ir.dag.facts import PassCost
from piper.ir.passes import Pass, Ref
from piper.ir.tensors import TensorSpec

Json = Any


class _NodeFile(ArrayRecord, frozen=True):
    """A node of a graph. Its arguments refer to earlier nodes by number."""

    op: Literal["placeholder", "call_function", "output"]
    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: TensorSpec | Mapping[Literal["several"], tuple[TensorSpec | None, ...]] | None
    """Its tensor, or those of an operation with several results; null for other results."""


class _FunctionFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    graph: tuple[_NodeFile, ...]
    arguments: tuple[Ref, ...]
    results: tuple[Ref, ...]
    cost: PassCost
    workspace: Count
    consumes: tuple[Ref, ...]


class _ProgramFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    functions: Mapping[Pass, _FunctionFile]
    specs: tuple[tuple[Ref, TensorSpec], ...]


_SAME = ("arguments", "results", "cost", "workspace")
"""The fields of a ``Function`` that its file has as they are."""


def program_to_json(program: ChunkProgram) -> Json:
    functions = {
        which: _FunctionFile(
            graph=_graph_to_file(function.module.graph),
            consumes=tuple(sorted(function.consumes, key=str)),
            **picked(function, _SAME),
        )
        for which, function in program.functions.items()
    }
    return encode(_ProgramFile(functions, tuple(program.specs.items())))


def program_from_json(data: Json) -> ChunkProgram:
    """The program of ``data``. The values of its graphs are on the meta device."""
    file: _ProgramFile = decode(_ProgramFile, data)
    specs = dict(file.specs)
    functions = {}
    with within("functions"):
        if Pass.F not in file.functions:
            raise MalformedError("it lacks the pass F")
        for which, function in file.functions.items():
            with within(which.value):
                functions[which] = _function_from_file(function, specs)
    return ChunkProgram(functions, specs)


def _function_from_file(file: _FunctionFile, specs: Mapping[Ref, TensorSpec]) -> Function:
    for refs in (file.arguments, file.results, file.consumes):
        if unknown := set(refs) - specs.keys():
            raise MalformedError(f"nothing is said of {unknown.pop()} in specs")
        if len(set(refs)) != len(refs):
            raise MalformedError("an argument or a result is there twice")
    if not set(file.consumes).issubset(file.arguments):
        raise MalformedError("what is consumed must be among the arguments")
    with within("graph"):
        module = _graph_from_file(file.graph)
        _check_ends(module.graph, file.arguments, file.results, specs)
    return Function(
        module=module,
        random=any(is_random(node) for node in module.graph.nodes),
        consumes=frozenset(file.consumes),
        **picked(file, _SAME),
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


def _graph_to_file(graph: fx.Graph) -> tuple[_NodeFile, ...]:
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    return tuple(
        _NodeFile(
            node.op,
            node.name,
            _target_name(node),
            tuple(_encode(x, numbers) for x in node.args),
            {key: _encode(x, numbers) for key, x in node.kwargs.items()},
            _value_to_file(node.meta.get("val")),
        )
        for node in graph.nodes
    )


def _graph_from_file(file: tuple[_NodeFile, ...]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    seen: set[str] = set()
    for place, item in enumerate(file):
        with within(place):
            if (item.op == "output") != (place == len(file) - 1):
                raise MalformedError("the output, and nothing else, comes at the end of a graph")
            if item.op == "placeholder" and nodes and nodes[-1].op != "placeholder":
                raise MalformedError("an argument after the first operation")
            if _identifier(item.name) in seen:
                raise MalformedError(f"{item.name} is there twice")
            seen.add(item.name)
            node = _node_from_file(graph, item, nodes)
            if isinstance(item.value, TensorSpec):
                node.meta["val"] = item.value.empty(_META)
            elif item.value:
                parts = item.value["several"]
                node.meta["val"] = tuple(part and part.empty(_META) for part in parts)
        nodes.append(node)
    if not nodes:
        raise MalformedError("a graph has at least an output")
    return module_of(graph)


def _node_from_file(graph: fx.Graph, item: _NodeFile, nodes: list[fx.Node]) -> fx.Node:
    name, target = item.name, item.target
    given = tuple(_decode(x, nodes) for x in item.args)
    named = {_identifier(key): _decode(x, nodes) for key, x in item.kwargs.items()}
    if item.op == "placeholder":
        if given or named:
            raise MalformedError(f"the argument {name} of a graph has no default")
        return graph.create_node("placeholder", _identifier(target), name=name)
    if item.op == "output":
        rows_of_nodes = len(given) == 1 and isinstance(given[0], list | tuple)
        if named or not rows_of_nodes or target != "output":
            raise MalformedError("an output is a list of what operations made")
        return graph.create_node("output", "output", given, name=name)
    if target == "getitem":
        whole = len(given) == 2 and isinstance(given[0], fx.Node) and type(given[1]) is int
        if named or not whole:
            raise MalformedError("getitem takes one of several results by its number")
        return graph.create_node("call_function", operator.getitem, given, name=name)
    overload = operator_named(target)
    check_arguments(overload, given, named)
    return graph.create_node("call_function", overload, given, named, name=name)


def _identifier(name: str) -> str:
    """``name``, if it is safe in Python source: an identifier without leading ``__``, no
    keyword."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise wrong(name, "a name of letters, digits and underscores")
    return name


_NAME = re.compile(r"(?!__)[A-Za-z_]\w{0,199}", re.ASCII)


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
        case None | bool() | int() | float() | str():
            return item
        case torch.dtype() | torch.memory_format() | torch.layout():
            return {"torch": torch_name(item)}
        case torch.device():
            return {"device": item.type}
        case complex():
            return {"complex": [item.real, item.imag]}
        case _:
            raise PiperError(f"the argument {item!r} of an operation cannot be saved")


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
            if not -(2**63) <= item < 2**63:
                raise wrong(item, "a number of 64 bits")
            return item
        case _:
            raise wrong(item, "an argument of an operation")


def device_named(name: Json) -> torch.device:
    if name not in ("cpu", "cuda", "meta", "mps", "xpu"):
        raise wrong(name, "a kind of device, such as cpu or cuda")
    return torch.device(name)


_DEPTH = 4
_META = torch.device("meta")
_CONSTANTS: Mapping[str, torch.dtype | torch.layout | torch.memory_format] = {
    name: item
    for name, item in vars(torch).items()
    if isinstance(item, torch.dtype | torch.layout | torch.memory_format)
}


def _value_to_file(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return {"several": tuple(map(_value_to_file, value))}
    return TensorSpec.of(value) if isinstance(value, Tensor) else None
