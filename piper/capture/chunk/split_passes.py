"""Cuts a joint graph into the passes F, B, BI and BW, each a function of its own.

BI and BW together are B: BI computes the gradients of the inputs, BW those of the parameters from
intermediate results of BI. All passes of a chunk use the same saved tensors, so a schedule may
choose between B and BI + BW for each microbatch. Saved tensors that BW does not read can be freed
after BI.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from piper.capture.chunk.autodiff import Joints
from piper.capture.chunk.joint import Joint
from piper.capture.chunk.remat_choice import choose
from piper.capture.code.chunk_program import ChunkProgram, Function
from piper.capture.graphs import ancestors, base_of, extract, has_tensor
from piper.ir.passes import Kind, Pass, Ref, RematPolicy
from piper.ir.tensors import TensorSpec, overlaps

NamedNodes = list[tuple[Ref, fx.Node]]


class Passes:
    """Joint graphs and their programs, each made once."""

    def __init__(self) -> None:
        self.joints: Joints = {}
        self._made: dict[tuple[Joint, RematPolicy], ChunkProgram] = {}

    def of(self, joint: Joint, policy: RematPolicy) -> ChunkProgram:
        """The program of ``joint`` under ``policy``."""
        key = joint, policy
        if key not in self._made:
            self._made[key] = split(joint, policy)
        return self._made[key]


def split(joint: Joint, policy: RematPolicy) -> ChunkProgram:
    """The program of a chunk whose forward saves the activations that ``policy`` chooses."""
    joint, kept = choose(joint, policy)
    outputs = [end for end in joint.results if end[0].kind is Kind.OUTPUT]
    inputs = [end for end in joint.gradients if end[0].kind is Kind.INPUT_GRAD]
    parameters = [end for end in joint.gradients if end[0].kind is Kind.PARAMETER_GRAD]
    there = {*kept, *(node for _, node in outputs), *joint.arguments}
    bi_saved = _bi_saved(joint, there, inputs, parameters) if inputs else []
    late = _read([node for _, node in parameters], {*there, *(node for _, node in bi_saved)})
    saved: NamedNodes = [
        *_numbered(Kind.SAVED, [node for node in kept if node not in late]),
        *_numbered(Kind.SAVED_FOR_BW, [node for node in kept if node in late]),
    ]
    start = {node: ref for node, ref in joint.arguments.items() if ref.kind in _FORWARD_ARGUMENTS}
    functions = {Pass.F: _function(joint, start, [*joint.results, *saved])}
    # a tensor with several names is read under the cheapest: argument, output, then saved
    known = {node: ref for ref, node in (*saved, *reversed(outputs))} | joint.arguments
    if joint.gradients:
        functions[Pass.B] = _function(joint, known, list(joint.gradients))
    if inputs:
        functions[Pass.BI] = _function(joint, known, [*inputs, *bi_saved])
    if parameters:
        later = {node: ref for ref, node in bi_saved} | known
        functions[Pass.BW] = _function(joint, later, parameters, _private(bi_saved, inputs))
    ends: Iterable[tuple[Ref, fx.Node]] = (
        *((ref, node) for node, ref in joint.arguments.items()),
        *joint.results,
        *saved,
        *bi_saved,
        *joint.gradients,
    )
    specs = {ref: TensorSpec.of(node.meta["val"]) for ref, node in ends}
    program = ChunkProgram(functions, specs | _copied(functions.values()))
    shared = {base_of(node) for _, node in (*joint.results, *inputs)}
    own = {ref for ref, node in (*saved, *bi_saved) if node not in shared}
    return program.consuming(own)


def _copied(functions: Iterable[Function]) -> dict[Ref, TensorSpec]:
    """The specs of parameter gradients as the passes make them: a copied gradient has other strides
    than in the joint graph. All passes copy the same ones."""
    made_specs = {}
    for function in functions:
        made: Any = function.module.graph.output_node().args[0]
        for ref, node in zip(function.results, made, strict=True):
            if ref.kind is Kind.PARAMETER_GRAD:
                made_specs[ref] = TensorSpec.of(node.meta["val"])
    return made_specs


_FORWARD_ARGUMENTS = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT)


def _numbered(kind: Kind, nodes: Iterable[fx.Node]) -> NamedNodes:
    return [(Ref(kind, i), node) for i, node in enumerate(nodes)]


def _read(targets: Collection[fx.Node], known: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes that a function from ``known`` to ``targets`` reads, and ``targets``."""
    needed = ancestors(targets, known)
    return {arg for node in needed for arg in node.all_input_nodes}.union(targets)


def _bi_saved(
    joint: Joint, known: Collection[fx.Node], inputs: NamedNodes, parameters: NamedNodes
) -> NamedNodes:
    """The tensors that BI computes and BW reads."""
    first = ancestors((node for _, node in inputs), known)
    # an op with several results is one computation: all its results count as computed
    first |= {item for node in first if not has_tensor(node) for item in node.users}
    targets = [node for _, node in parameters]
    second = ancestors((node for node in targets if node not in first), {*known, *first})
    read = {arg for node in second for arg in node.all_input_nodes if arg in first}
    read |= {node for node in targets if node in first}
    bases = {base_of(node) for node in read}.difference(known)
    return _numbered(Kind.BI_SAVED, (node for node in joint.graph.nodes if node in bases))


def _private(bi_saved: NamedNodes, inputs: NamedNodes) -> set[Ref]:
    """The tensors saved by BI that share no storage with an input's gradient."""
    shared = {base_of(node) for _, node in inputs}
    return {ref for ref, node in bi_saved if node not in shared}


def _function(
    joint: Joint, known: dict[fx.Node, Ref], ends: NamedNodes, private: Collection[Ref] = ()
) -> Function:
    """The function to ``ends`` from the nodes of ``known`` that it needs; ``private`` are arguments
    without another reference."""
    targets = [node for _, node in ends]
    used = _read(targets, known)
    sources = {node: ref for node, ref in known.items() if node in used}
    is_forward = any(ref.kind is Kind.OUTPUT for ref, _ in ends)
    late = frozenset() if is_forward else joint.forward
    module = extract(joint.graph, list(sources), targets, late)
    taken = [ref for ref in sources.values() if ref not in private]
    _own_gradients(module, list(sources.values()), taken, [ref for ref, _ in ends])
    return Function.of(module, sources.values(), (ref for ref, _ in ends))


def _own_gradients(
    module: fx.GraphModule, arguments: list[Ref], others: list[Ref], results: list[Ref]
) -> None:
    """Copy each parameter gradient that overlaps itself or shares storage with another result or
    with an argument in ``others``, which outlives the call, so that gradient accumulation can add
    to it in place."""
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    taken = {n for n, ref in zip(placeholders, arguments, strict=True) if ref in others}
    output = graph.output_node()
    ends = list(output.args[0])  # type: ignore[arg-type]
    bases = [base_of(node) for node in ends]
    for i, (ref, node) in enumerate(zip(results, ends, strict=True)):
        if ref.kind is not Kind.PARAMETER_GRAD:
            continue
        if bases[i] in taken or bases.count(bases[i]) > 1 or overlaps(node.meta["val"]):
            with graph.inserting_before(output):
                ends[i] = graph.call_function(torch.ops.aten.clone.default, (node,))
                ends[i].update_kwarg("memory_format", torch.contiguous_format)
            ends[i].meta["val"] = node.meta["val"].contiguous()
            bases[i] = ends[i]
    output.args = (ends,)
    module.recompile()
