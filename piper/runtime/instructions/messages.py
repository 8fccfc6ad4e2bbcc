"""SEND and RECV between groups, and all-to-all dispatch and combine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from piper.base.errors import CapacityError
from piper.ir.ops import Collective, Transfer
from piper.ir.overlaps import Overlap, most_overlaps, received_by, scattered, sent_by
from piper.ir.plan.instructions import Instruction
from piper.runtime.comm.protocol import Begin
from piper.runtime.context import ExecutionContext
from piper.runtime.instructions.expert_rows import (
    beyond,
    counts_within,
    merged,
    own_counts,
    pack,
    packed,
    padded,
    unmerged,
    unpack,
)
from piper.runtime.pending import BoundInstruction, Pending


def send(context: ExecutionContext, x: Instruction, op: Transfer) -> BoundInstruction:
    """Sends each receiver its part of a value; or, of sorted rows, the number of rows per expert in
    its range."""
    slots, name, dim, rows = context.slots, x.name, op.dim, op.counts
    (slot,) = x.reads
    rest = rows is not None and _runs(op) > 1
    messages = [
        (context.comm.send(x.node, x.stream, part.peer), part)
        for part in sent_by(op, context.device)
    ]

    def cut() -> list[Tensor]:
        if rows is not None:
            return [counts_within(slots[slot], *p.within(rows), rest) for _, p in messages]
        data = slots[slot] if dim else slots[slot].contiguous()
        return [_part(data, p, dim).contiguous() for _, p in messages]

    def execute() -> Pending:
        parts = cut()
        handles = [begin(part) for (begin, _), part in zip(messages, parts, strict=True)]
        return Pending(name, handles, keeps=parts)

    return execute


def receive(context: ExecutionContext, x: Instruction, op: Transfer) -> BoundInstruction:
    """Receives the parts of a value; or the rows per expert for each sorted range of this device's
    rows, one after another."""
    where, name, dim = context.where, x.name, op.dim
    store = context.store(x)
    (slot,) = x.writes
    spec = context.code.values[op.parts[1]][x.of]
    runs = 0 if op.counts is None else _runs(op)
    shape = spec.shape if runs < 2 else (runs, spec.shape[0] + 1)
    messages = [
        (context.comm.receive(x.node, x.stream, part.peer), part)
        for part in received_by(op, context.device)
    ]
    aside = not runs and scattered(op, sends=False)

    def execute() -> Pending:
        out = torch.empty(shape, dtype=spec.dtype, device=where)
        if runs:
            parts = list(out.zero_().view(runs, -1)[: len(messages)])
        else:
            parts = [_part(out, part, dim) for _, part in messages]
        into = [part.new_empty(part.shape) for part in parts] if aside else parts
        handles = [begin(part) for (begin, _), part in zip(messages, into, strict=True)]

        def finish() -> None:
            if aside:
                for part, come in zip(parts, into, strict=True):
                    part.copy_(come)
            store(context.arrange(slot, out))

        return Pending(name, handles, finish)

    return execute


def _part(x: Tensor, part: Overlap, dim: int) -> Tensor:
    return x if part.whole else x.narrow(dim, *part.within(x.shape[dim]))


def _runs(op: Transfer) -> int:
    """The most sorted ranges that a device's own rows consist of."""
    source, target = op.parts
    return most_overlaps(target, source)


def all_to_all_by_counts(
    context: ExecutionContext, x: Instruction, op: Collective, begin: Begin, ways: int
) -> BoundInstruction:
    """Dispatches rows sorted by expert to the experts' devices, or combines them back. The numbers
    of rows are known only when this runs."""
    slots, device, name = context.slots, context.device, x.name
    store = context.store(x)
    (slot, counts, received), (target,) = x.reads, x.writes
    rows, runs = op.rows, op.runs
    assert rows is not None
    goes = op.dispatches
    merges = goes and runs > 1

    def in_order(mine: Tensor) -> Callable[[Tensor], Tensor]:
        """A function that puts combined rows back in the order before they were merged."""
        return partial(unmerged, counts=mine) if runs > 1 and not goes else lambda x: x

    def without_waiting() -> Pending:
        mine = slots[counts]
        there, here = own_counts(mine, runs).view(ways, -1).sum(1), slots[received].sum(0)
        sent, got = (there, here) if goes else (here, there)
        room = slots[slot].shape[0] if goes else rows
        data = padded(merged(slots[slot], mine) if merges else slots[slot], sent, room)
        out = torch.empty_like(data)
        handle = begin(data, out)
        back = in_order(mine)

        def finish() -> None:
            come = packed(out, got, rows)
            if not goes:
                come.masked_fill_(beyond(got, come), 0)  # rows without an expert
            store(context.arrange(target, back(come)))

        return Pending(name, [handle], finish, keeps=(data,))

    def by_device(mine: Tensor, come: Tensor) -> tuple[list[int], list[int]]:
        """For each device: how many of our rows go to its experts, and how many of its rows come
        here."""
        known = context.counted.get(received)
        if known is None or known[0]() is not come:
            own = own_counts(mine, runs)
            numbers = torch.cat((own, come.flatten())).tolist()
            each, rest = len(own) // ways, numbers[len(own) :]
            there = [sum(numbers[each * i : each * (i + 1)]) for i in range(ways)]
            known = weakref.ref(come), (there, [sum(rest[i::ways]) for i in range(ways)])
            context.counted[received] = known
        return known[1]

    def execute() -> Pending:
        mine, coming, come = slots[counts], context.coming.get(received), slots[received]
        data = merged(slots[slot], mine) if merges else slots[slot].contiguous()
        out = data.new_empty(rows, *data.shape[1:])

        def tensors() -> tuple[Tensor, Tensor, list[int], list[int]]:
            there, here = by_device(mine, come if coming is None else coming())
            sent, got = (there, here) if goes else (here, there)
            if sum(got) > rows:
                raise CapacityError(
                    f"{name}: device {device} is sent {sum(got)} rows for its experts ({got} from "
                    f"each device) and has room for {rows}: give shard(..., capacity=) more, or "
                    "leave it out for room for all"
                )
            if not goes:
                out[sum(got) :].zero_()  # rows without an expert
            return data[: sum(sent)], out[: sum(got)], sent, got

        handle = begin(*tensors()) if coming is None else begin(tensors)
        back = in_order(mine)

        def finish() -> None:
            store(context.arrange(target, back(out)))

        return Pending(name, [handle], finish, keeps=(data,))

    return lambda: without_waiting() if op.padded and context.state.capturable else execute()


def all_to_all(
    context: ExecutionContext, x: Instruction, op: Collective, begin: Begin, ways: int
) -> BoundInstruction:
    slots, runs = context.slots, op.runs
    store = context.store(x)
    (slot,), (target,) = x.reads, x.writes
    sent, received = (0, 1) if op.dispatches else (1, 0)

    def execute() -> Pending:
        given = slots[slot] if runs == 1 else own_counts(slots[slot], runs).unsqueeze(1)
        data = pack(given, sent, ways)
        out = torch.empty_like(data)
        handle = begin(data, out)
        context.coming[target] = lambda: unpack(out, received)

        def finish() -> None:
            del context.coming[target]
            store(context.arrange(target, unpack(out, received)))

        return Pending(x.name, [handle], finish, keeps=(data,))

    return execute
