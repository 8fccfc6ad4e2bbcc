"""ADD: sums the gradients of a value."""

from __future__ import annotations

import torch

from piper.ir.plan.instructions import Instruction
from piper.runtime.context import ExecutionContext
from piper.runtime.pending import BoundInstruction


def add(context: ExecutionContext, x: Instruction) -> BoundInstruction:
    """Sums the reads in order into new memory: the memory of the first may be shared."""
    slots = context.slots
    first, second, *others = x.reads
    (target,) = x.writes
    stride = context.wanted.get(target)

    def execute() -> None:
        total, term = slots[first], slots[second]
        into = None if stride is None else total.new_empty_strided(total.shape, stride)
        into = torch.add(total, term, out=into)
        for slot in others:
            into.add_(slots[slot])
        slots[target] = into

    return execute
