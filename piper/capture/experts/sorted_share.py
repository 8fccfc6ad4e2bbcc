"""An expert region on sorted rows, traced for a device that holds only some of the experts.

    rows from all devices ─▶ sorted by expert ─▶ the region's own operations ─▶ sorted back

A device receives rows from several devices, each device's rows sorted by expert, and their counts
by expert and device. It has room for ``rows`` rows; memory after the last received row is never
read.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from piper.base.errors import CaptureError
from piper.capture.chunk.chunks import Body, Chunk
from piper.capture.experts.separation import separate_sorted
from piper.capture.graphs import module_of, returned
from piper.capture.operators.grouped_mm import REGROUP
from piper.capture.shard.placements import REPLICATED
from piper.capture.shard.resizing import resized
from piper.capture.trace.quiet import quiet_tracing
from piper.ir.shards import SortedRows

aten = torch.ops.aten


def dispatched_shape(shape: Sequence[int], ways: int) -> tuple[int, ...]:
    """The shape of an expert-major tensor after the all-to-all dispatch among ``ways`` devices."""
    experts, rows, *rest = shape
    return (experts // ways, rows * ways, *rest)


def sorted_share(chunk: Chunk, found: SortedRows, ways: int, dim: int, rows: int) -> Body:
    """The body of one of ``ways`` shares of ``chunk``."""
    body = chunk.body
    placeholders = body.module.graph.find_nodes(op="placeholder")
    first = body.parameters + body.buffers
    counts = placeholders[first + found.counts]
    layouts = separate_sorted(chunk, found, dim)

    def shape(node: fx.Node) -> tuple[int, ...]:
        return layouts.shape(node, ways, Fraction(rows, found.rows))

    for node in returned(body.module.graph):
        if layouts.places(node) != (REPLICATED, Shard(0)):
            raise CaptureError(
                f"region {chunk.name} mixes experts: it does not make one row for each that it "
                "takes; do the dispatch and the combination outside"
            )
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    mode = body.fakes()[0].fake_mode
    for node in placeholders:
        new[node] = graph.placeholder(node.name)
        size = dispatched_shape(node.meta["val"].shape, ways) if node is counts else shape(node)
        new[node].meta["val"] = _empty(mode, node.meta["val"], size)
    made = graph.call_function(REGROUP, (new[counts], rows))
    order, back = (graph.call_function(operator.getitem, (made, i)) for i in range(2))
    for node in placeholders[first:]:
        if node is not counts:
            new[node] = graph.call_function(aten.index_select.default, (new[node], 0, order))
    for node in body.module.graph.nodes:
        if node.op != "call_function":
            continue
        new[node] = graph.node_copy(node, new.__getitem__)
        if layouts.has_parts(node):
            copied = new[node]
            copied.target, copied.args, copied.kwargs = resized(
                copied.target, copied.args, copied.kwargs, shape(node)
            )
    graph.output(
        tuple(
            graph.call_function(aten.index_select.default, (new[node], 0, back))
            for node in returned(body.module.graph)
        )
    )
    module = module_of(graph)
    fakes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    with quiet_tracing():
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
    key = f"{body.key} share {ways} of {rows} rows along {dim}"
    return Body(module, body.parameters, body.buffers, body.inputs, body.outputs, 0, key)


def _empty(mode: FakeTensorMode, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    with mode:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
