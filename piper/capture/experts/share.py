"""An expert region, traced for a device that holds only some of the experts, or has other rows.

A captured region takes ``[experts, rows, ...]`` and all parameters. After the all-to-all dispatch a
device has ``[experts / ways, ways * rows, ...]`` and its shard of the parameters.

If rows are sorted by expert, a device receives rows from several devices, each device's rows sorted
by expert, and their counts by expert and device:

    rows from all devices ─▶ sorted by expert ─▶ the region's own operations ─▶ sorted back
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from piper.base.errors import CaptureError
from piper.base.units import counted
from piper.capture.chunk.autodiff import trace
from piper.capture.chunk.chunks import Body, Chunk
from piper.capture.chunk.expert_regions import sorted_rows
from piper.capture.chunk.joint import Joint
from piper.capture.chunk.split_passes import Passes
from piper.capture.code.codegen import Compiler
from piper.capture.experts.apart import on_experts, on_rows
from piper.capture.graphs import calls_of, module_of, returned
from piper.capture.model import Captured
from piper.capture.operators.grouped_mm import REGROUP
from piper.ir.shards import SortedRows
from piper.ir.tensors import TensorSpec


def trace_share(
    chunk: Chunk, joint: Joint, ways: int, dim: int, rows: int | None, compiler: Compiler
) -> Joint:
    """The joint graph of one device's share of ``chunk``, whose own joint graph is ``joint``. If
    rows are sorted by expert, ``rows`` is the most that a device may receive."""
    sorting = sorted_rows(chunk.body)
    times = Fraction(ways) if sorting is None else Fraction(rows or 0, sorting.rows)
    body = on_experts(chunk.body, chunk.name, sorting, ways, dim)
    body = on_rows(body, chunk.name, sorting, times)
    if sorting is not None:
        body = _regrouped(body, sorting, ways)
    return _traced(body, joint, compiler)


def _regrouped(body: Body, sorting: SortedRows, ways: int) -> Body:
    """The body on rows from ``ways`` devices. Memory after the last received row is never read."""
    first = body.parameters + body.buffers
    at, given = first + sorting.counts, body.fakes()
    room = next(len(x) for i, x in enumerate(given) if i >= first and i != at)
    given[at] = given[at].new_empty((len(given[at]), ways))  # type: ignore[call-overload]

    def regrouped(*arguments: Tensor) -> tuple[Tensor, ...]:
        order, back = REGROUP(arguments[at], room)
        taken = [
            x if i < first or i == at else x.index_select(0, order) for i, x in enumerate(arguments)
        ]
        return tuple(x.index_select(0, back) for x in body.module(*taken))

    return replace(
        body, module=module_of(calls_of(regrouped, given)), key=f"{body.key} from {ways}"
    )


def with_rows(
    captured: Captured, experts: Collection[int], parts: int, of: int, passes: Passes
) -> Captured:
    """``captured`` has the shapes of one of ``of`` devices. Return it with the chunks in
    ``experts`` at the shapes of one of ``parts`` devices that share the same rows. Only these
    chunks can run in the result."""
    times = Fraction(of, parts)
    chunks, values = list(captured.chunks), list(captured.cut.values)
    joints, programs = list(captured.joints), list(captured.programs)
    known: dict[Joint, tuple[Body, Joint]] = {}
    for index in experts:
        chunk, joint = chunks[index], joints[index]
        if joint not in known:
            body = _resized(chunk, times, of, parts)
            known[joint] = body, _traced(body, joint, captured.compiler)
        body, joints[index] = known[joint]
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


def _resized(chunk: Chunk, times: Fraction, of: int, parts: int) -> Body:
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
    return on_rows(chunk.body, chunk.name, sorting, times)


def _traced(body: Body, joint: Joint, compiler: Compiler) -> Joint:
    """The joint graph of ``body``, for the same gradients as ``joint``."""
    ends = returned(body.module.graph)
    strides = tuple(
        stride and tuple(torch.empty(node.meta["val"].shape, device="meta").stride())
        for stride, node in zip(joint.demand.outputs, ends, strict=False)
    )
    return trace(body, replace(joint.demand, outputs=strides), compiler)
