"""Sums over the activations of one step on one device, by value."""

from __future__ import annotations

from collections import defaultdict

from piper.ir.ops import Compute
from piper.ir.passes import Kind, Pass
from piper.runtime.context import ExecutionContext
from piper.runtime.pending import BoundInstruction
from piper.state.device.element_sums import ElementSums


class ActivationSums:
    """An observer of a plan: sums of the floating-point tensors that forwards make and read, over
    the microbatches."""

    def __init__(self) -> None:
        self.made = defaultdict[int, ElementSums](ElementSums)
        """By value, of this device's part."""
        self.read = defaultdict[int, ElementSums](ElementSums)
        """The same as its readers get it: after a collective, for example."""

    def wrapped(
        self, execute: BoundInstruction, pc: int, context: ExecutionContext
    ) -> BoundInstruction:
        """``execute``, between the sums of its inputs and those of its outputs."""
        x = context.plan.instructions[pc]
        if not isinstance(x.op, Compute) or x.op.which is not Pass.F:
            return execute
        piece = context.code.pieces[x.op.chunk]
        results = context.code.programs[x.rows.parts][x.op.chunk].functions[Pass.F].results
        reads = {
            piece.inputs[ref.index]: slot
            for ref, slot in context.read(x, x.op).items()
            if ref.kind is Kind.INPUT
        }
        writes = {
            piece.outputs[results[made.places[0]].index]: made.slot
            for made in context.written(x, x.op)
            if not made.bundle and results[made.places[0]].kind is Kind.OUTPUT
        }

        def summed() -> None:
            _add(self.read, reads, context)  # first: it may free them
            execute()
            _add(self.made, writes, context)

        return summed


def _add(sums: dict[int, ElementSums], slots: dict[int, int], context: ExecutionContext) -> None:
    for value, slot in slots.items():
        activation = context.slots[slot]
        if activation.is_floating_point() and activation.numel():
            sums[value] += ElementSums.of(activation)
