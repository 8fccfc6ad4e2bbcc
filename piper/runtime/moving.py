"""Messages between groups, and all-to-all dispatch and combine, as functions of no arguments."""

from __future__ import annotations

import torch

from piper.errors import PiperError
from piper.ir.dag import Collective, Transfer
from piper.ir.overlaps import received_by, scattered, sent_by
from piper.ir.values import ExtraRole
from piper.lower.plan import Instruction
from piper.runtime.comm import Begin
from piper.runtime.context import ExecutionContext
from piper.runtime.messages import combine, dispatch, packed, padded
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


def all_to_all_by_counts(
    context: ExecutionContext, x: Instruction, op: Collective, begin: Begin, ways: int
) -> BoundInstruction:
    """Rows sorted by expert go to the devices that have the experts, or come back, as many as are
    counted when this runs."""
    slots, device, name = context.slots, context.device, x.name
    store = context.store(x)
    (slot, counts, received), (target,) = x.reads, x.writes
    rows = op.rows
    assert rows is not None
    goes = x.role is ExtraRole.DISPATCHED

    def without_waiting() -> Pending:
        there, here = slots[counts].view(ways, -1).sum(1), slots[received].sum(0)
        sent, got = (there, here) if goes else (here, there)
        room = slots[slot].shape[0] if goes else rows
        data = padded(slots[slot], sent, room)
        out = torch.empty_like(data)
        handle = begin(data, out)

        def finish() -> None:
            store(context.arrange(target, packed(out, got, rows)))

        return Pending(name, [handle], finish, keeps=(data,))

    if op.padded:
        return without_waiting

    def execute() -> Pending:
        there = slots[counts].view(ways, -1).sum(1).tolist()
        here = slots[received].sum(0).tolist()
        sent, got = (there, here) if goes else (here, there)
        if sum(got) > rows:
            raise PiperError(
                f"{name}: device {device} is sent {sum(got)} rows for its experts ({got} from "
                f"each device) and has room for {rows}: give shard(..., capacity=) more, or leave "
                "it out for room for all"
            )
        data = slots[slot].contiguous()
        out = data.new_empty(rows, *data.shape[1:])
        handle = begin(data[: sum(sent)], out[: sum(got)], sent, got)

        def finish() -> None:
            store(context.arrange(target, out))

        return Pending(name, [handle], finish, keeps=(data,))

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
