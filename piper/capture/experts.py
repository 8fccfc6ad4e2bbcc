"""A region of experts, traced for a device that holds only some of them.

Captured, a region takes ``[experts, rows, ...]`` and all parameters; after the exchange a device
has ``[experts / ways, ways * rows, ...]`` and its part of the parameters. The region's own ops are
traced again at these shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from piper.capture.autodiff import Demand, trace
from piper.capture.chunks import Body, Chunk
from piper.capture.codegen import Compiler
from piper.capture.graphs import returned
from piper.capture.joint import Joint
from piper.capture.program import Kind, Ref
from piper.errors import CaptureError

Shape = tuple[int, ...]


def exchanged_shape(shape: Sequence[int], ways: int) -> Shape:
    """The shape of an expert-major tensor after the exchange between ``ways`` devices."""
    experts, rows, *rest = shape
    return (experts // ways, rows * ways, *rest)


def trace_share(chunk: Chunk, joint: Joint, ways: int, dim: int, compiler: Compiler) -> Joint:
    """The joint graph of one device's share of ``chunk``, whose own joint graph is ``joint``."""
    body = _share(chunk, ways, dim)
    outputs = [node.meta["val"] for node in returned(body.module.graph)[: body.outputs]]
    inputs = body.fakes()[body.parameters + body.buffers :]
    taken, wanted = set(joint.arguments.values()), {ref for ref, _ in joint.gradients}
    demand = Demand(
        parameters=tuple(Ref(Kind.PARAMETER_GRAD, i) in wanted for i in range(body.parameters)),
        inputs=tuple(Ref(Kind.INPUT_GRAD, i) in wanted for i in range(body.inputs)),
        outputs=tuple(
            _packed(x) if Ref(Kind.OUTPUT_GRAD, i) in taken else None for i, x in enumerate(outputs)
        ),
        carried=tuple(
            _packed(x) if Ref(Kind.INPUT_GRAD, i) in taken else None for i, x in enumerate(inputs)
        ),
        changing=tuple(i in joint.changing for i in range(body.buffers)),
    )
    return trace(body, demand, compiler)


def _packed(x: torch.Tensor) -> Shape:
    return tuple(torch.empty(x.shape, device="meta").stride())


def _share(chunk: Chunk, ways: int, dim: int) -> Body:
    """The chunk's body at the shapes of one share."""
    body = chunk.body
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.module.graph, {}))
    module = fx.GraphModule(torch.nn.Module(), graph)
    old = body.fakes()
    mode = old[0].fake_mode
    first = body.parameters + body.buffers
    fakes = [
        _empty(mode, x, _divided(x.shape, ways, dim)) if i < body.parameters
        else _empty(mode, x, exchanged_shape(x.shape, ways)) if i >= first
        else x
        for i, x in enumerate(old)
    ]  # fmt: skip
    try:
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise CaptureError(
            f"region {chunk.name} cannot run on a share of its experts: its operations name the "
            f"sizes they were written for ({str(error).splitlines()[0]}); write it so that every "
            "size follows from its inputs and parameters, for instance with torch.bmm or "
            "torch.einsum, or reshape with -1"
        ) from error
    for before, after in zip(returned(body.module.graph), returned(graph), strict=True):
        wanted = exchanged_shape(before.meta["val"].shape, ways)
        found = tuple(after.meta["val"].shape)
        if found != wanted:
            raise CaptureError(
                f"region {chunk.name} mixes experts: on one of {ways} shares it makes "
                f"{list(found)}, not {list(wanted)}; do the dispatch and the combination outside"
            )
    key = f"{body.key} share {ways} along {dim}"
    return Body(module, body.parameters, body.buffers, body.inputs, body.outputs, body.updates, key)


def _divided(shape: Sequence[int], ways: int, dim: int) -> Shape:
    return tuple(n // ways if i == dim else n for i, n in enumerate(shape))


def _empty(mode: FakeTensorMode, like: FakeTensor, shape: Shape) -> torch.Tensor:
    with mode:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
