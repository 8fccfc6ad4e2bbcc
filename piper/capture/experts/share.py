"""An expert region, traced for a device that holds only some of the experts, or has other rows.

A captured region takes ``[experts, rows, ...]`` and all parameters. After the all-to-all dispatch a
device has ``[experts / ways, ways * rows, ...]`` and its shard of the parameters. The region's ops
are traced again at these shapes, after a proof that they treat each expert and each row by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import Shard
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from piper.base.errors import CaptureError
from piper.base.units import counted
from piper.capture.chunk.autodiff import Demand, trace
from piper.capture.chunk.chunks import Body, Chunk
from piper.capture.chunk.expert_regions import sorted_rows
from piper.capture.chunk.joint import Joint
from piper.capture.chunk.split_passes import Passes
from piper.capture.code.codegen import Compiler
from piper.capture.experts.separation import Separate, separate, separate_sorted
from piper.capture.experts.sorted_share import dispatched_shape, sorted_share
from piper.capture.graphs import module_of, returned
from piper.capture.model import Captured
from piper.capture.shard.resizing import resized
from piper.capture.trace.quiet import quiet_tracing
from piper.ir.passes import Kind, Ref
from piper.ir.tensors import TensorSpec

Shape = tuple[int, ...]


def trace_share(
    chunk: Chunk, joint: Joint, ways: int, dim: int, rows: int | None, compiler: Compiler
) -> Joint:
    """The joint graph of one device's share of ``chunk``, whose own joint graph is ``joint``. If
    rows are sorted by expert, ``rows`` is the most that a device may receive."""
    sorting = sorted_rows(chunk.body)
    if sorting is not None:
        assert rows is not None
        body = sorted_share(chunk, sorting, ways, dim, rows)
    else:
        body = _share(chunk, ways, dim)
    return _traced(body, joint, compiler)


def with_rows(
    captured: Captured, dims: Mapping[int, int], parts: int, of: int, passes: Passes
) -> Captured:
    """``captured`` has the shapes of one of ``of`` devices. Return it with its expert chunks at the
    shapes of one of ``parts`` devices that share the same rows. ``dims`` gives the expert dimension
    of their parameters, by chunk. Only these chunks can run in the result."""
    times = Fraction(of, parts)
    chunks, values = list(captured.chunks), list(captured.cut.values)
    joints, programs = list(captured.joints), list(captured.programs)
    known: dict[tuple[Joint, int], tuple[Body, Joint]] = {}
    for index, dim in dims.items():
        chunk, joint = chunks[index], joints[index]
        key = joint, dim
        if key not in known:
            body = _resized(chunk, dim, times, of, parts)
            known[key] = body, _traced(body, joint, captured.compiler)
        body, joints[index] = known[key]
        chunks[index] = replace(chunk, body=body)
        programs[index] = passes.of(joints[index], captured.remat)
        ends = [*body.fakes()[body.parameters + body.buffers :]]
        ends += [node.meta["val"] for node in returned(body.module.graph)]
        for value, fake in zip((*chunk.inputs, *chunk.outputs), ends, strict=True):
            values[value] = replace(values[value], spec=TensorSpec.of(fake))
    return replace(
        captured,
        cut=replace(captured.cut, chunks=tuple(chunks), values=tuple(values)),
        joints=tuple(joints),
        programs=tuple(programs),
    )


def _resized(chunk: Chunk, dim: int, times: Fraction, of: int, parts: int) -> Body:
    """The chunk's body with ``times`` as many rows."""
    sorting = sorted_rows(chunk.body)
    first = chunk.body.parameters + chunk.body.buffers
    rows = sorting.rows if sorting else chunk.body.fakes()[first].shape[1]
    if (rows * times).denominator > 1:
        which = "sorted by expert" if sorting else "for each expert"
        fits = [str(n) for n in range(1, parts + 1) if rows * of % n == 0]
        raise CaptureError(
            f"region {chunk.name} has {rows} rows {which} on each of {counted(of, 'device')}, "
            f"which {parts} devices cannot share evenly; numbers that work: {', '.join(fits)}. "
            "Change the batch, the sequence or the capacity of an expert, or leave axes out of "
            "shard(batch=)"
        )
    found = separate(chunk, dim) if sorting is None else separate_sorted(chunk, sorting, dim)
    return _at_shapes(chunk, found, lambda node: found.shape(node, 1, times))


def _traced(body: Body, joint: Joint, compiler: Compiler) -> Joint:
    """The joint graph of ``body``, with the same arguments and gradients as ``joint``."""
    outputs = [node.meta["val"] for node in returned(body.module.graph)[: body.outputs]]
    taken, wanted = set(joint.arguments.values()), {ref for ref, _ in joint.gradients}
    demand = Demand(
        parameters=tuple(Ref(Kind.PARAMETER_GRAD, i) in wanted for i in range(body.parameters)),
        inputs=tuple(Ref(Kind.INPUT_GRAD, i) in wanted for i in range(body.inputs)),
        outputs=tuple(
            _packed(x) if Ref(Kind.OUTPUT_GRAD, i) in taken else None for i, x in enumerate(outputs)
        ),
        apart=tuple(Ref(Kind.INPUT_GRAD, i, 1) in wanted for i in range(body.inputs)),
        changing=tuple(i in joint.changing for i in range(body.buffers)),
    )
    return trace(body, demand, compiler)


def _packed(x: torch.Tensor) -> Shape:
    return tuple(torch.empty(x.shape, device="meta").stride())


def _share(chunk: Chunk, ways: int, dim: int) -> Body:
    """The chunk's body at the shapes of one of ``ways`` shares."""
    body = chunk.body
    found = separate(chunk, dim)
    made = _at_shapes(chunk, found, lambda node: found.shape(node, ways, Fraction(ways)))
    for before, after in zip(returned(body.module.graph), returned(made.module.graph), strict=True):
        wanted = dispatched_shape(before.meta["val"].shape, ways)
        actual = tuple(after.meta["val"].shape)
        if found.places(before) != (Shard(0), Shard(1)) or actual != wanted:
            raise CaptureError(
                f"region {chunk.name} mixes experts: on one of {ways} shares it makes "
                f"{list(actual)}, not {list(wanted)} with the experts first "
                "and their rows second; do the dispatch and the combination outside"
            )
    return made


def _at_shapes(chunk: Chunk, found: Separate, shape: Callable[[fx.Node], Shape]) -> Body:
    """The chunk's body with every value at its ``shape``."""
    body = chunk.body
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.module.graph, copies))
    for node, copied in copies.items():
        if node.op == "call_function" and found.has_parts(node):
            copied.target, copied.args, copied.kwargs = resized(
                copied.target, copied.args, copied.kwargs, shape(node)
            )
    module = module_of(graph)
    mode = body.fakes()[0].fake_mode
    placeholders = body.module.graph.find_nodes(op="placeholder")
    fakes = [_empty(mode, node.meta["val"], shape(node)) for node in placeholders]
    try:
        with quiet_tracing():
            FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise CaptureError(
            f"region {chunk.name} cannot run on a share of its experts: its operations name the "
            f"sizes they were written for ({str(error).splitlines()[0]}); write it so that every "
            "size follows from its inputs and parameters, for instance with torch.bmm or "
            "torch.einsum, or reshape with -1"
        ) from error
    for node, copied in copies.items():
        value = copied.meta["val"]
        if isinstance(value, torch.Tensor) and tuple(value.shape) != shape(node):
            raise CaptureError(
                f"region {chunk.name} cannot run on a share of its experts: {node.target} makes "
                f"{list(value.shape)} there, not {list(shape(node))}; leave its sizes to its "
                "inputs (broadcasting, -1)"
            )
    key = f"{body.key} at {[list(fake.shape) for fake in fakes]}"
    return Body(module, body.parameters, body.buffers, body.inputs, body.outputs, body.updates, key)


def _empty(mode: FakeTensorMode, like: FakeTensor, shape: Shape) -> torch.Tensor:
    with mode:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
