"""All-reduces of the values that a step reports: loss, outputs, gradient norm, expert load."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from piper.ir.dag.values import Content
from piper.ir.plan.instructions import Instruction
from piper.runtime.comm.protocol import Begin
from piper.runtime.context import ExecutionContext
from piper.runtime.instructions.update import counted_once, gradients_of, squares
from piper.runtime.pending import BoundInstruction, Pending

Own = Callable[[], Tensor]
"""Computes this device's term of a sum."""


def _losses(context: ExecutionContext, x: Instruction) -> Own:
    slots, where = context.slots, context.where
    losses = len(x.weights)
    uneven = any(weight != 1 for weight in x.weights)
    weights = torch.tensor(x.weights, dtype=torch.float64, device=where) if uneven else None

    def own() -> Tensor:
        data = torch.zeros(2, dtype=torch.float64, device=where)
        for i, part in enumerate((x.reads[:losses], x.reads[losses:])):
            if part:
                scalars = torch.stack([slots[slot].reshape(()) for slot in part])
                if weights is not None:
                    scalars = scalars * weights
                narrow = scalars.dtype in (torch.bfloat16, torch.float16)
                data[i] = (scalars.float() if narrow else scalars).sum()
        return data

    return own


def _means(context: ExecutionContext, x: Instruction) -> Own:
    slots, where = context.slots, context.where
    weights = torch.tensor(x.weights, dtype=torch.float64, device=where)

    def own() -> Tensor:
        data = torch.zeros((), dtype=torch.float64, device=where)
        if x.reads:
            data += torch.stack([slots[slot].double() for slot in x.reads]).mul(weights).sum()
        return data

    return own


def _squares(context: ExecutionContext, x: Instruction) -> Own:
    slots, where = context.slots, context.where
    collect = [(context.state.held[b], gradients_of(context, b, x.reads)) for b in x.buckets]
    updated = () if collect else x.reads

    def own() -> Tensor:
        data = torch.zeros((), dtype=torch.float64, device=where)
        for held, gradients in collect:
            data += squares(counted_once(held, gradients()))
        for slot in updated:
            data += slots[slot]
        return data

    return own


def _rows(context: ExecutionContext, x: Instruction) -> Own:
    slots, where = context.slots, context.where
    (slot,) = x.writes
    experts = context.plan.slots[slot].nbytes // torch.int64.itemsize

    def own() -> Tensor:
        data = torch.zeros(experts, dtype=torch.int64, device=where)
        for counts in x.reads:
            data += slots[counts].flatten()
        return data

    return own


_OWN: Mapping[Content | None, Callable[[ExecutionContext, Instruction], Own]] = {
    Content.LOSS: _losses,
    Content.OUTPUT: _means,
    Content.NORM: _squares,
    Content.LOAD: _rows,
}


def sum_scalar(context: ExecutionContext, x: Instruction, begin: Begin) -> BoundInstruction:
    """All-reduces what every device has of the sum, and keeps it for the report of the step."""
    own, store, content = _OWN[x.content](context, x), context.store(x), x.content
    assert content is not None

    def execute() -> Pending:
        data = own()
        handle = begin(data)

        def finish() -> None:
            context.scalars.sums[content, x.of] = data
            store(data)

        return Pending(x.name, [handle], finish)

    return execute
