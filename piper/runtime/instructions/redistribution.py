"""Redistributes activations and gradients to another layout along a mesh axis."""

from __future__ import annotations

import torch

from piper.ir.collectives import Move
from piper.ir.ops import Collective, Select
from piper.ir.plan.instructions import Instruction
from piper.runtime.comm.protocol import Begin
from piper.runtime.context import ExecutionContext
from piper.runtime.pending import BoundInstruction, Pending


def redistribute(
    context: ExecutionContext, x: Instruction, op: Collective, begin: Begin, ways: int
) -> BoundInstruction:
    """Dimension 0 indexes the members in the output of an all-gather, in the input of a
    reduce-scatter, and in both of an all-to-all."""
    slots, kind = context.slots, op.kind
    store = context.store(x)
    (slot,), (target,) = x.reads, x.writes

    def summed() -> Pending:
        if target == slot:
            out = slots[slot].contiguous()
        else:  # the input may be a view of a tensor with other readers
            out = slots[slot].clone(memory_format=torch.contiguous_format)
        handle = begin(out)
        return Pending(x.name, [handle], lambda: store(context.arrange(target, out)), keeps=(out,))

    def moved() -> Pending:
        data = slots[slot].contiguous()
        shape = tuple(data.shape)
        if kind is Move.ALL_GATHER:
            shape = (ways, *shape)
        elif kind is Move.REDUCE_SCATTER:
            shape = shape[1:]
        out = torch.empty(shape, dtype=data.dtype, device=data.device)
        handle = begin(data.view(-1), out.view(-1))
        return Pending(x.name, [handle], lambda: store(context.arrange(target, out)), keeps=(data,))

    return summed if kind is Move.ALL_REDUCE else moved


def select(context: ExecutionContext, x: Instruction, op: Select) -> BoundInstruction:
    """Takes this member's part of a tensor that all members have. Dimension 0 indexes the parts."""
    slots = context.slots
    (slot,), (target,) = x.reads, x.writes
    rank = next(group.index(context.device) for group in op.groups if context.device in group)

    def execute() -> None:
        part = slots[slot].select(0, rank).clone(memory_format=torch.contiguous_format)
        slots[target] = context.arrange(target, part)

    return execute
