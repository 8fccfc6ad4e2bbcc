"""Messages between groups, and all-to-all dispatch and combine, as functions of no arguments."""

from __future__ import annotations

import torch

from piper.ir.dag import Transfer
from piper.ir.overlaps import received_by, scattered, sent_by
from piper.ir.values import ExtraRole
from piper.lower.plan import Instruction
from piper.runtime.comm import Begin
from piper.runtime.context import ExecutionContext
from piper.runtime.messages import combine, dispatch
from piper.runtime.pending import BoundInstruction, Pending


def send(context: ExecutionContext, x: Instruction, op: Transfer) -> BoundInstruction:
    slots, name, dim = context.slots, x.name, op.dim
    (slot,) = x.reads
    messages = [
        (context.comm.send(x.node, x.stream, part.peer), part)
        for part in sent_by(op, context.device)
    ]
    if len(messages) == 1 and messages[0][1].whole:
        ((begin, _),) = messages

        def whole() -> Pending:
            data = slots[slot].contiguous()
            return Pending(name, (begin(data),), keeps=(data,))

        return whole

    def execute() -> Pending:
        data = slots[slot] if dim else slots[slot].contiguous()
        size = data.shape[dim]
        parts = [data.narrow(dim, *part.within(size)).contiguous() for _, part in messages]
        handles = [begin(part) for (begin, _), part in zip(messages, parts, strict=True)]
        return Pending(name, handles, keeps=parts)

    return execute


def receive(context: ExecutionContext, x: Instruction, op: Transfer) -> BoundInstruction:
    where, name, dim = context.where, x.name, op.dim
    store = context.store(x)
    (slot,) = x.writes
    spec = context.code.values[op.parts[1]][x.of]
    messages = [
        (context.comm.receive(x.node, x.stream, part.peer), part)
        for part in received_by(op, context.device)
    ]
    size = spec.shape[dim] if spec.shape else 0
    aside = scattered(op, sends=False)

    def execute() -> Pending:
        out = torch.empty(spec.shape, dtype=spec.dtype, device=where)
        parts = [out if part.whole else out.narrow(dim, *part.within(size)) for _, part in messages]
        into = [part.new_empty(part.shape) for part in parts] if aside else parts
        handles = [begin(part) for (begin, _), part in zip(messages, into, strict=True)]

        def finish() -> None:
            if aside:
                for part, come in zip(parts, into, strict=True):
                    part.copy_(come)
            store(context.arrange(slot, out))

        return Pending(name, handles, finish)

    return execute


def all_to_all(
    context: ExecutionContext, x: Instruction, begin: Begin, ways: int
) -> BoundInstruction:
    slots = context.slots
    store = context.store(x)
    (slot,), (target,) = x.reads, x.writes
    pack, unpack = dispatch(ways) if x.role is ExtraRole.DISPATCHED else combine(ways)

    def execute() -> Pending:
        data = pack(slots[slot])
        out = torch.empty_like(data)
        handle = begin(data, out)

        def finish() -> None:
            store(context.arrange(target, unpack(out)))

        return Pending(x.name, [handle], finish, keeps=(data,))

    return execute
