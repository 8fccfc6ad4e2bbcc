"""A captured model enters; its facts leave: sizes and costs of its passes, without graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piper.capture.blame import operation_text
from piper.capture.chunk.chunks import Body, Chunk
from piper.capture.chunk.donation import private_results
from piper.capture.chunk.expert_regions import sorted_rows
from piper.capture.chunk.joint import Joint
from piper.capture.chunk.split_passes import Passes
from piper.capture.code.chunk_program import ChunkProgram, Function
from piper.capture.code.executables import ChunkSignature
from piper.capture.graphs import base_of, returned, workspace
from piper.capture.model import Captured
from piper.ir.dag.facts import (
    ChunkFacts,
    Model,
    ParameterFacts,
    PassFacts,
    Stored,
    ValueFacts,
    Variant,
)
from piper.ir.passes import Kind, Pass, Ref, RematPolicy, bundled
from piper.ir.tensors import TensorSpec


class Known:
    """A cache of the facts of joint graphs, shared by models that have the same joint graphs."""

    def __init__(self, passes: Passes | None = None) -> None:
        self.passes = passes or Passes()
        self._variants: dict[tuple[Joint, RematPolicy], Variant] = {}

    def variant(self, captured: Captured, joint: Joint, policy: RematPolicy) -> Variant:
        """The facts of ``joint`` under ``policy``."""
        key = joint, policy
        if key not in self._variants:
            self._variants[key] = _variant(captured, self.passes.of(joint, policy))
        return self._variants[key]


def facts_of(
    captured: Captured,
    remat: RematPolicy,
    joints: Sequence[Joint] | None = None,
    known: Known | None = None,
    policies: Iterable[RematPolicy] = RematPolicy,
) -> Model:
    """The facts of a captured model, with one variant for each of ``policies``, among which a
    strategy can choose. ``joints``, if given, replace the chunks' own joint graphs; ``known``
    caches facts between calls."""
    joints = captured.joints if joints is None else joints
    known = known or Known()
    chosen = tuple(policies)
    values = tuple(
        ValueFacts(
            value.name,
            value.spec.shape,
            value.spec.nbytes,
            value.spec.copied,
            placements=value.placements,
        )
        for value in captured.cut.values
    )
    chunks = tuple(
        ChunkFacts(
            index=chunk.index,
            tags={region.name: region.index for region in chunk.tags},
            variants={policy: known.variant(captured, joint, policy) for policy in chosen},
            gradients=tuple(
                (ref, stored)
                for ref, spec in program.specs.items()
                if ref.kind is Kind.INPUT_GRAD
                and spec.shape == values[chunk.inputs[ref.index]].shape  # else it never runs here
                and (stored := Stored.of(spec)) != values[chunk.inputs[ref.index]].stored
            ),
            segments=chunk.segments,
            sorted_rows=sorted_rows(chunk.body),
            products=_products(chunk.body),
            gathered=chunk.gathered,
            **of_signature(chunk, program),
        )
        for chunk, joint, program in zip(captured.chunks, joints, captured.programs, strict=True)
    )
    size = captured.example.size
    cut = captured.cut
    return Model(
        chunks=chunks,
        values=values,
        loss=cut.loss,
        batch=size,
        remat=remat,
        count=cut.count,
        outputs=cut.outputs,
        declared=captured.declared,
        flops=captured.microbatches * sum(map(_flops, chunks)),
        **of_state(
            list(zip(captured.chunks, captured.programs, strict=True)),
            captured.parameters,
            captured.master,
        ),
    )


def _flops(chunk: ChunkFacts) -> int:
    """Operations of a forward and a backward, without recomputation."""
    passes = chunk.variants[RematPolicy.NONE].passes
    return sum(passes[which].flops for which in (Pass.F, Pass.B) if which in passes)


def of_signature(piece: Chunk | ChunkSignature, program: ChunkProgram) -> dict[str, Any]:
    """The facts of a chunk that its executables show."""
    return {
        "parameters": piece.parameters,
        "inputs": piece.inputs,
        "outputs": piece.outputs,
        "changes": piece.updates,
        "buffers": piece.buffers,
        "random": program.functions[Pass.F].random,
        "detached": tuple(
            name
            for i, name in enumerate(piece.parameters)
            if Ref(Kind.PARAMETER_GRAD, i) not in program.specs
        ),
    }


def of_state(
    code: Sequence[tuple[Chunk | ChunkSignature, ChunkProgram]],
    specs: Mapping[str, TensorSpec],
    master: torch.dtype | None,
) -> dict[str, Any]:
    """The facts of parameters and buffers that the executables of all chunks show. ``specs`` are
    those of whole parameters."""
    trained = {
        piece.parameters[ref.index]
        for piece, program in code
        for ref in program.specs
        if ref.kind is Kind.PARAMETER_GRAD
    }
    return {
        "parameters": {
            name: ParameterFacts(
                spec.shape, spec.nbytes, name in trained, spec.dtype, master or spec.dtype
            )
            for name, spec in specs.items()
        },
        "buffers": {
            name: program.specs[Ref(Kind.BUFFER, i)].nbytes
            for piece, program in code
            for i, name in enumerate(piece.buffers)
        },
    }


_PRODUCTS = {
    "linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "convolution", "conv1d",
    "conv2d", "conv3d", "scaled_dot_product_attention", "head_tail_attention", "grouped_mm",
}  # fmt: skip


def _products(body: Body) -> tuple[str, ...]:
    nodes = [node for node in body.module.graph.nodes if node.op == "call_function"]
    names = [str(getattr(node.target, "overloadpacket", "")).rpartition(".")[2] for node in nodes]
    kept = (node for node, name in zip(nodes, names, strict=True) if name in _PRODUCTS)
    return tuple(dict.fromkeys(map(operation_text, kept)))


def _variant(captured: Captured, program: ChunkProgram) -> Variant:
    return Variant(
        passes={which: _pass(captured, program, which) for which in program.functions},
        saved_bytes=program.saved_bytes - program.saved_for_bw_bytes,
        saved_for_bw_bytes=program.saved_for_bw_bytes,
        bi_saved_bytes=sum(spec.nbytes for spec in program.bi_saved),
    )


_LATER: Mapping[Pass, tuple[Pass, ...]] = {
    Pass.F: (Pass.B, Pass.BI, Pass.BW),
    Pass.B: (),
    Pass.BI: (Pass.BW,),
    Pass.BW: (),
}


def _pass(captured: Captured, program: ChunkProgram, which: Pass) -> PassFacts:
    function = program.functions[which]
    reads, writes, uses_parameters, last = ends_of(program, which)
    freeing = max(0, _freeing(function, last))
    return PassFacts(
        reads=reads,
        writes=writes,
        cost=function.cost,
        uses_parameters=uses_parameters,
        workspace=function.workspace,
        last=last,
        eased=function.workspace - freeing,
        housed=max(
            0,
            _housed(captured, program, function, ()) - function.workspace,
            _housed(captured, program, function, last) - freeing,
        ),
        private=private_results(function),
    )


def ends_of(
    program: ChunkProgram, which: Pass
) -> tuple[tuple[Ref, ...], tuple[Ref, ...], bool, tuple[Ref, ...]]:
    """The refs that a pass reads and writes, whether it uses parameters, and the refs that no
    later pass of the chunk reads."""
    function = program.functions[which]
    after = [program.functions[later] for later in _LATER[which] if later in program.functions]
    needed = {ref for later in after for ref in bundled(later.arguments)}
    reads = bundled(function.arguments)
    return (
        reads,
        bundled(function.results),
        any(ref.kind is Kind.PARAMETER for ref in function.arguments),
        tuple(ref for ref in reads if ref not in needed),
    )


def _housed(
    captured: Captured, program: ChunkProgram, function: Function, last: tuple[Ref, ...]
) -> int:
    """The workspace of a function when parameter gradients have preallocated memory: it writes
    some of them there directly, and the others are copied there at the end."""
    graph = function.module.graph
    grads = [i for i, r in enumerate(function.results) if r.kind is Kind.PARAMETER_GRAD]
    specs = {i: program.specs[function.results[i]] for i in grads}
    fitting = [
        i
        for i in captured.compiler.into(function)
        if specs[i].copied is None and captured.master in (None, specs[i].dtype)
    ]
    ends = returned(graph)
    into = [base_of(ends[i]) for i in fitting]
    copied = sum(specs[i].nbytes for i in grads if i not in fitting)
    return workspace(graph, _given(function, last), into) + copied


def _freeing(function: Function, last: tuple[Ref, ...]) -> int:
    """The workspace of a function that frees the arguments in ``last`` after their last use."""
    return workspace(function.module.graph, _given(function, last))


def _given(function: Function, last: tuple[Ref, ...]) -> list[fx.Node]:
    placeholders = function.module.graph.find_nodes(op="placeholder")
    arguments = zip(placeholders, function.arguments, strict=True)
    dying = set(last)
    return [node for node, ref in arguments if dying and not dying.isdisjoint(bundled((ref,)))]
