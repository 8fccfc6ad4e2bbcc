"""Queries on FX graphs (views, ancestors, workspace), ``extract``, which takes a part of a
graph out as a function, ``module_of``, and ``called``, which adds an operation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from piper.capture.operators.grouped_mm import working_memory
from piper.ir.grouped import grouped
from piper.ir.tensors import TensorSpec


def is_random(node: fx.Node) -> bool:
    """Whether the op draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and _draws(node)


def mutates(node: fx.Node) -> bool:
    """Whether the op changes one of its arguments."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _draws(node: fx.Node) -> bool:
    """Attention is tagged as random, but draws only with dropout; its backward takes the seed and
    draws nothing."""
    it = arguments(node)
    return "philox_seed" not in it and bool(it.get("dropout_p", 1.0) != 0.0)


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operation by name, in the order of its schema."""
    schema = getattr(node.target, "_schema", None)
    given = {x.name: x.default_value for x in schema.arguments} if schema else {}
    return given | dict(zip(given, node.args, strict=False)) | node.kwargs


def returned(graph: fx.Graph) -> list[fx.Node]:
    """The graph's results, flat and in order, without those that are None."""
    nodes = pytree.tree_leaves(graph.output_node().args[0])
    return [node for node in nodes if isinstance(node, fx.Node)]


def operations(graph: fx.Graph) -> Iterator[fx.Node]:
    """The operations of a graph, in order."""
    return (node for node in graph.nodes if node.op == "call_function")


def has_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor, not a tuple of tensors."""
    return isinstance(node.meta.get("val"), Tensor)


def base_of(node: fx.Node) -> fx.Node:
    """The node whose storage ``node`` views; ``node`` itself unless a view op made it."""
    while True:
        maker = node.args[0] if node.target is operator.getitem else node
        if not isinstance(maker, fx.Node) or not _is_view(maker):
            return node
        base = maker.args[0]
        assert isinstance(base, fx.Node)
        node = base


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and _makes_views(node.target)


@cache
def _makes_views(op: OpOverload) -> bool:
    if op is torch.ops.aten._unsafe_view.default:
        return True
    returns = () if op._schema.is_mutable else op._schema.returns
    return any(result.alias_info is not None for result in returns)


def ancestors(targets: Iterable[fx.Node], stops: Collection[fx.Node]) -> set[fx.Node]:
    """``targets`` and every node that they depend on; the search excludes ``stops`` and does not
    pass them."""
    visited: set[fx.Node] = set()
    pending = [node for node in targets if node not in stops]
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            pending.extend(arg for arg in node.all_input_nodes if arg not in stops)
    return visited


def computed_from(nodes: Iterable[fx.Node], sources: Collection[fx.Node]) -> dict[fx.Node, None]:
    """Those of ``nodes`` that read nothing but ``sources`` and each other, in their order."""
    made: dict[fx.Node, None] = {}
    for node in nodes:
        if node not in sources and all(x in sources or x in made for x in node.all_input_nodes):
            made[node] = None
    return made


def extract(
    graph: fx.Graph,
    sources: Sequence[fx.Node],
    targets: Sequence[fx.Node],
    late: Collection[fx.Node] = (),
) -> fx.GraphModule:
    """The part of ``graph`` that computes ``targets`` from ``sources``, as a function.

    Ops run in the order of ``graph``, except ops in ``late``: each runs just before its first use,
    so that recomputed tensors live as briefly as possible.
    """
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in sources:
        copies[node] = part.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
    needed = ancestors(targets, copies)
    for node in graph.nodes:
        if node in needed and (node not in late or node in targets):
            for op in _missing(node, copies):
                copies[op] = part.node_copy(op, copies.__getitem__)
    part.output([copies[node] for node in targets])
    return module_of(part)


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """``graph`` as a module. Its code is generated when it is first called: most are never."""
    return _LazyGraphModule(torch.nn.Module(), graph)


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy of ``graph``; the values of its nodes are the same objects."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def named_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """``module`` with its new tensors on ``device``, which may differ from the one it was traced
    on."""
    if all(node.kwargs.get("device", device) == device for node in module.graph.nodes):
        return module
    graph = copied(module.graph)
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    return module_of(graph)


def called(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new operation of ``graph``, with its fake result, in the place of ``like`` in the model."""
    made = graph.call_function(target, args, kwargs)
    near = (x.meta["val"] for x in (like, *like.all_input_nodes, *made.all_input_nodes))
    mode = next(x.fake_mode for x in near if isinstance(x, FakeTensor))
    made.meta = {**like.meta, "val": fake_result(made, mode)}
    return made


def calls_of(function: Callable[..., Any], values: Iterable[Any]) -> fx.Graph:
    """The operations that ``function``, plain torch code, calls on ``values``."""
    with torch.no_grad():
        return make_fx(function, pre_dispatch=True)(*values).graph


def inlined(
    graph: fx.Graph, function: Callable[..., Any], *given: fx.Node
) -> tuple[list[fx.Node], Any]:
    """Adds the operations that ``function`` calls on the values of ``given``. Returns them, and
    what is the result of the function."""
    body = calls_of(function, (x.meta["val"] for x in given))
    new = dict(zip(body.find_nodes(op="placeholder"), given, strict=True))
    made = []
    for node in operations(body):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
        new[node] = graph.create_node("call_function", node.target, args, kwargs)
        new[node].meta["val"] = node.meta["val"]
        made.append(new[node])
    return made, fx.node.map_arg(body.output_node().args[0], new.__getitem__)


def fake_result(node: fx.Node, mode: FakeTensorMode) -> Any:
    """What an operation makes of the fake values of its arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _missing(node: fx.Node, done: Collection[fx.Node]) -> list[fx.Node]:
    """``node`` and its inputs that are not ``done``, in topological order."""
    order: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        top = pending[-1]
        if top in done or top in order:
            pending.pop()
            continue
        waits = [arg for arg in top.all_input_nodes if arg not in done and arg not in order]
        if waits:
            pending.extend(reversed(waits))
        else:
            order[pending.pop()] = None
    return list(order)


def workspace(
    graph: fx.Graph, given: Collection[fx.Node] = (), into: Collection[fx.Node] = ()
) -> int:
    """Peak bytes of a call beyond its arguments and results. A call frees its own tensors, and the
    arguments in ``given``, after their last use. Nodes in ``into`` are written into the caller's
    memory."""
    results = {base_of(node) for node in returned(graph)}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for arg in node.all_input_nodes:
            last[base_of(arg)] = node
    dying = grouped((node, base) for base, node in last.items())
    size = {node: TensorSpec.of(node.meta["val"]).nbytes for node in given}
    held = peak = kept = 0
    for node in graph.nodes:
        made, unused = made_by(node) if node not in into else ({}, 0)
        size.update(made)
        held += sum(made.values())
        kept += sum(n for result, n in made.items() if result in results)
        peak = max(peak, held + unused + working_memory(node))
        for base in dying.get(node, ()):
            if base not in results:
                held -= size.get(base, 0)
    return peak - kept


def made_by(node: fx.Node) -> tuple[dict[fx.Node, int], int]:
    """Bytes of new memory that an op allocates, by the node of each tensor, and the bytes of its
    results without a reader."""
    value = node.meta.get("val")
    if node.op != "call_function" or node.target is operator.getitem or base_of(node) is not node:
        return {}, 0
    if isinstance(value, Tensor):
        return {node: TensorSpec.of(value).nbytes}, 0
    if not isinstance(value, list | tuple) or _is_view(node):
        return {}, 0
    takers = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    sizes = {i: TensorSpec.of(x).nbytes for i, x in enumerate(value) if isinstance(x, Tensor)}
    unused = sum(n for i, n in sizes.items() if i not in takers)
    return {takers[i]: n for i, n in sizes.items() if i in takers}, unused


def nbytes_of(node: fx.Node) -> int:
    """Bytes of the storage of a node's tensor; 0 for another value."""
    value = node.meta.get("val")
    return TensorSpec.of(value).nbytes if isinstance(value, Tensor) else 0
