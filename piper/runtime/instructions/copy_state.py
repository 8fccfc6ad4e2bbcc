"""COPY: copies a bucket's state to host memory for a background save."""

from __future__ import annotations

from piper.ir.ops import Copy
from piper.ir.plan.instructions import Instruction
from piper.runtime.context import ExecutionContext
from piper.runtime.pending import BoundInstruction, Pending


def copy(context: ExecutionContext, x: Instruction, op: Copy) -> BoundInstruction:
    state = context.state

    def execute() -> Pending:
        snapshot = state.snapshot
        return Pending(x.name, [] if snapshot is None else [snapshot.copy(op.bucket)])

    return execute
