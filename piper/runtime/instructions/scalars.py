"""All-reduces of the values that a step reports: loss, outputs, gradient norm, expert load."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from piper.ir.plan.instructions import Instruction
from piper.runtime.comm.protocol import Begin
from piper.runtime.context import ExecutionContext, Scalars
from piper.runtime.instructions.update import counted_once, gradients_of, squares
from piper.runtime.pending import BoundInstruction, Pending


def loss(context: ExecutionContext, x: Instruction, begin: Begin) -> BoundInstruction:
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

    def keep(scalars: Scalars, data: Tensor) -> None:
        scalars.loss = data

    return _summed(context, x, begin, own, keep)


def mean(context: ExecutionContext, x: Instruction, begin: Begin) -> BoundInstruction:
    slots, where = context.slots, context.where
    weights = torch.tensor(x.weights, dtype=torch.float64, device=where)

    def own() -> Tensor:
        data = torch.zeros((), dtype=torch.float64, device=where)
        if x.reads:
            data += torch.stack([slots[slot].double() for slot in x.reads]).mul(weights).sum()
        return data

    def keep(scalars: Scalars, data: Tensor) -> None:
        scalars.outputs[x.of] = data

    return _summed(context, x, begin, own, keep)


def norm(context: ExecutionContext, x: Instruction, begin: Begin) -> BoundInstruction:
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

    def keep(scalars: Scalars, data: Tensor) -> None:
        scalars.norm = data

    return _summed(context, x, begin, own, keep)


def load(context: ExecutionContext, x: Instruction, begin: Begin) -> BoundInstruction:
    slots, where = context.slots, context.where
    (slot,) = x.writes
    experts = context.plan.slots[slot].nbytes // torch.int64.itemsize

    def own() -> Tensor:
        data = torch.zeros(experts, dtype=torch.int64, device=where)
        for counts in x.reads:
            data += slots[counts].flatten()
        return data

    def keep(scalars: Scalars, data: Tensor) -> None:
        scalars.load[x.of] = data

    return _summed(context, x, begin, own, keep)


def _summed(
    context: ExecutionContext,
    x: Instruction,
    begin: Begin,
    own: Callable[[], Tensor],
    keep: Callable[[Scalars, Tensor], None],
) -> BoundInstruction:
    """All-reduces the results of ``own`` over all devices. ``keep`` stores the sum in the step's
    scalars."""
    store = context.store(x)

    def execute() -> Pending:
        data = own()
        handle = begin(data)

        def finish() -> None:
            keep(context.scalars, data)
            store(data)

        return Pending(x.name, [handle], finish)

    return execute
