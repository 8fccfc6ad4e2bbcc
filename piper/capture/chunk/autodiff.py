"""Turns a chunk's body into its joint forward and backward graph, traced once.

``differentiate`` walks the chunks forward to find the values that depend on trained parameters,
then backward to find the values that receive a gradient, and traces each distinct chunk for exactly
these. The autograd engine does not run at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from piper.base.errors import CaptureError
from piper.capture.blame import explain
from piper.capture.chunk.chunks import Body, Cut
from piper.capture.chunk.joint import Demand, Joint, Stride
from piper.capture.code.codegen import Compiler
from piper.capture.graphs import mutates, operations, returned
from piper.capture.intercept.autograd_functions import functions_of, state_of, warn_of_changes
from piper.ir.passes import Kind, Ref

_PHASE = "piper_forward"


Joints = dict[tuple[str, Demand], Joint]
"""Joint graphs by the key of their body and what is demanded of it."""


def differentiate(
    cut: Cut, trained: Callable[[str], bool], compiler: Compiler, known: Joints
) -> tuple[Joint, ...]:
    """The joint graph of each chunk; equal chunks with equal demands share one. ``known`` are those
    of other captures of the model, in the other mode, for the same ``compiler``; it gets those made
    here."""
    flows = _gradient_flow(cut, trained)
    if not flows[cut.loss]:
        raise CaptureError(
            "the loss depends on no trainable parameter: check requires_grad, and that the loss "
            "is not computed under torch.no_grad or from detached values"
        )
    received: dict[int, Stride] = {cut.loss: cut.values[cut.loss].spec.stride}
    joints = dict(known)
    in_reverse: list[Joint] = []
    for chunk in reversed(cut.chunks):
        demand = Demand(
            parameters=tuple(trained(name) for name in chunk.parameters),
            inputs=tuple(flows[i] for i in chunk.inputs),
            outputs=tuple(received.get(i) for i in chunk.outputs),
            apart=tuple(i in received for i in chunk.inputs),
            changing=tuple(name in cut.updates for name in chunk.buffers),
        )
        key = (chunk.body.key, demand)
        if key not in joints:
            try:
                joints[key] = _traced(chunk.body, demand, compiler)
            except Exception as error:
                raise explain(error, f"the backward of region {chunk.name}") from error
            if _says_all(chunk.body):
                known[key] = joints[key]
        joint = joints[key]
        in_reverse.append(joint)
        for ref, node in joint.gradients:
            if ref.kind is Kind.INPUT_GRAD:
                value, term = chunk.inputs[ref.index], node.meta["val"]
                received[value] = _summed(received.get(value), term)
    return tuple(reversed(in_reverse))


def _says_all(body: Body) -> bool:
    """Whether the key of ``body`` says what it computes in other traces, too: the names of blocks
    and of autograd functions may mean others there."""
    calls = [x.target for x in body.module.graph.nodes if x.op not in ("placeholder", "output")]
    return all(isinstance(x, OpOverload | BuiltinFunctionType) for x in calls)


def _traced(body: Body, demand: Demand, compiler: Compiler) -> Joint:
    """``trace``. A body with an autograd function is traced twice, since its Python code may
    compute something else each time."""
    functions = functions_of(body.module.graph)
    if not functions:
        return trace(body, demand, compiler)
    before = state_of(functions)
    first, second = (trace(body, demand, compiler) for _ in range(2))
    if not warn_of_changes(before, state_of(functions)) and _text(first) != _text(second):
        names = ", ".join(function.__name__ for function in functions)
        raise CaptureError(
            f"the autograd function {names} computes something else each time it is traced, and "
            "the captured step would repeat the first for ever: a number from outside torch is in "
            "its forward or backward; give it to the function as a tensor (a buffer, or one of the "
            "batch)"
        )
    return first


def _text(joint: Joint) -> str:
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in joint.graph.nodes)


def _summed(before: Stride | None, term: Tensor) -> Stride:
    """The strides of the sum of a tensor with strides ``before`` and ``term``."""
    if before is None:
        return tuple(term.stride())
    first, other = (
        torch.empty_strided(term.shape, stride, device="meta") for stride in (before, term.stride())
    )
    return tuple((first + other).stride())


def _gradient_flow(cut: Cut, trained: Callable[[str], bool]) -> list[bool]:
    """For each value, whether it depends on a trained parameter in a differentiable way."""
    flows = [False] * len(cut.values)
    seen: dict[tuple[str, tuple[bool, ...]], tuple[bool, ...]] = {}
    for chunk in cut.chunks:
        needs = (
            *map(trained, chunk.parameters),
            *(False for _ in chunk.buffers),
            *(flows[i] for i in chunk.inputs),
        )
        key = (chunk.body.key, needs)
        if key not in seen:
            try:
                seen[key] = _outputs_need(chunk.body, needs)
            except Exception as error:
                raise explain(error, f"region {chunk.name}") from error
        for index, flow in zip(chunk.outputs, seen[key], strict=False):
            flows[index] = flow
    return flows


def _outputs_need(body: Body, needs: tuple[bool, ...]) -> tuple[bool, ...]:
    with _tracing(body) as mode, mode:
        results = body.module(*_leaves(body, needs))
    return tuple(x.requires_grad for x in results)


def trace(body: Body, demand: Demand, compiler: Compiler) -> Joint:
    """Trace ``body`` together with the vector-Jacobian product that ``demand`` asks for."""
    needs = (*demand.parameters, *(False for _ in range(body.buffers)), *demand.inputs)
    n_primals = len(needs)
    outputs = {i: s for i, s in enumerate(demand.outputs) if s is not None}
    apart = [i for i, alone in enumerate(demand.apart) if alone]
    changing = {i for i, changes in enumerate(demand.changing) if changes}
    wanted = _gradient_refs(demand)

    def joint(*args: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        primals, tangents = args[:n_primals], list(args[n_primals:])
        first_input = body.parameters + body.buffers
        with traceback.annotate({_PHASE: True}):
            # copy changing buffers, so that their old content can be saved for the backward
            now = [
                x.clone() if i in changing else x
                for i, x in enumerate(primals, start=-body.parameters)
            ]
            results = body.module(*now)
        # The engine starts from the gradient that an input already has and adds one term for each
        # use here, in the order of an uncut backward. `_terms` reads the terms off these additions.
        heads = [results[i] for i in outputs] + [primals[first_input + i] for i in apart]
        first = {Kind.INPUT_GRAD: first_input, Kind.PARAMETER_GRAD: 0}
        sources = [primals[first[ref.kind] + ref.index] for ref in wanted]
        if not heads or not sources:
            return list(results), [None] * len(sources)
        grads = torch.autograd.grad(heads, sources, tangents, allow_unused=True)
        return list(results), list(grads)

    with _tracing(body) as mode:
        primals = _leaves(body, needs)
        results = returned(body.module.graph)
        inputs = primals[len(needs) - body.inputs :]
        with mode:
            tangents = [_strided(results[i].meta["val"], s) for i, s in outputs.items()]
            tangents += [_strided(inputs[i], inputs[i].stride()) for i in apart]
        module = make_fx(joint, decomposition_table=dict(compiler.decompositions()))(
            *primals, *tangents
        )
        _erase_detach(module.graph)
        _conjugate_numbers(module.graph)
        if any(mutates(node) for node in module.graph.nodes):
            module = _functionalize(module)
    refs = [
        *(Ref(Kind.PARAMETER, i) for i in range(body.parameters)),
        *(Ref(Kind.BUFFER, i) for i in range(body.buffers)),
        *(Ref(Kind.INPUT, i) for i in range(body.inputs)),
        *(Ref(Kind.OUTPUT_GRAD, i) for i in outputs),
        *(Ref(Kind.INPUT_GRAD, i) for i in apart),
    ]
    labelled = _label(module.graph, refs, body, demand)
    compiler.rewrite(module)
    return labelled.moved_to(module.graph)


def _label(graph: fx.Graph, refs: list[Ref], body: Body, demand: Demand) -> Joint:
    wanted = _gradient_refs(demand)
    placeholders = graph.find_nodes(op="placeholder")
    begun = {ref: node for node, ref in zip(placeholders, refs, strict=True) if ref in wanted}
    arguments = {n: ref for n, ref in zip(placeholders, refs, strict=True) if ref not in wanted}
    for number, (node, ref) in enumerate(arguments.items()):
        # torch's partitioner recognizes the inputs of a joint graph by these names
        node.target = f"{'tangents' if ref.kind is Kind.OUTPUT_GRAD else 'primals'}_{number + 1}"
        node.name = node.target
    results: Any = graph.output_node().args[0]
    made, grads = results
    kinds = [Ref(Kind.OUTPUT, i) for i in range(body.outputs)]
    kinds += [Ref(Kind.UPDATE, i) for i in range(body.updates)]
    gradients = tuple(
        (Ref(ref.kind, ref.index, i), term)
        for ref, total in zip(wanted, grads, strict=True)
        if total is not None
        for i, term in enumerate(_terms(begun[ref], total) if ref in begun else [total])
    )
    graph.output_node().args = ([*made, *(g for _, g in gradients)],)
    graph.eliminate_dead_code()
    for node in begun.values():
        graph.erase_node(node)
    forward = {x for x in operations(graph) if (x.meta.get("custom") or {}).get(_PHASE)}
    return Joint(
        graph=graph,
        arguments=arguments,
        forward=frozenset(forward),
        results=tuple(zip(kinds, made, strict=True)),
        gradients=gradients,
        demand=demand,
    )


def _terms(begun: fx.Node, total: fx.Node) -> list[fx.Node]:
    """The terms that were added to ``begun``, in order, to make ``total``."""
    terms = []
    while begun is not total:
        (step,) = begun.users
        assert step.target is torch.ops.aten.add.Tensor, "the engine does nothing but add"
        (term,) = (arg for arg in step.all_input_nodes if arg is not begun)
        terms.append(term)
        begun = step
    return terms


def _gradient_refs(demand: Demand) -> list[Ref]:
    inputs = [Ref(Kind.INPUT_GRAD, i) for i, wanted in enumerate(demand.inputs) if wanted]
    parameters = [Ref(Kind.PARAMETER_GRAD, i) for i, w in enumerate(demand.parameters) if w]
    return inputs + parameters


@contextmanager
def _tracing(body: Body) -> Iterator[FakeTensorMode]:
    values = (node.meta.get("val") for node in body.module.graph.nodes)
    mode = next(x.fake_mode for x in values if isinstance(x, FakeTensor))
    # oneDNN's LSTM passes its backward a workspace that a graph cannot hold
    recurrent = any(node.target is torch.ops.aten.lstm.input for node in body.module.graph.nodes)
    plain = _without_onednn() if recurrent else nullcontext()
    with torch.enable_grad(), traceback.preserve_node_meta(), plain:
        yield mode


@contextmanager
def _without_onednn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _strided(like: Tensor, stride: Stride) -> Tensor:
    return torch.empty_strided(like.shape, stride, dtype=like.dtype, device=like.device)


def _leaves(body: Body, needs: tuple[bool, ...]) -> list[Tensor]:
    """Fresh fake arguments of ``body``, requiring grad where ``needs`` says so."""
    leaves = []
    for fake, need in zip(body.fakes(), needs, strict=True):
        with fake.fake_mode:
            leaf = _strided(fake, fake.stride())
        leaves.append(leaf.requires_grad_(need))
    return leaves


def _erase_detach(graph: fx.Graph) -> None:
    """Erase detach and alias: the autograd engine never runs these graphs."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _conjugate_numbers(graph: fx.Graph) -> None:
    """Fold conj and clone of complex numbers. The backward of a product with a complex number
    conjugates a tensor that holds it; the graph has the number itself in place of that tensor."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        number = node.args[0] if node.args else None
        if node.target in (aten._conj.default, aten.clone.default) and isinstance(number, complex):
            number = number.conjugate() if node.target is aten._conj.default else number
            for user in list(node.users):
                user.args = tuple(number if arg is node else arg for arg in user.args)
            graph.erase_node(node)


def _functionalize(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with in-place ops (dropout's draw, some backward formulas) made pure."""
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    pure = torch.func.functionalize(fx.Interpreter(module).run, remove="mutations")
    return make_fx(pure)(*fakes)
