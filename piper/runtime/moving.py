"""Messages between groups, and exchanges among experts, as functions of no arguments."""

from __future__ import annotations

import torch

from piper.ir.dag import Transfer
from piper.ir.values import ExtraRole
from piper.lower.plan import Instruction
from piper.runtime.board import Board
from piper.runtime.messages import exchange_back, exchange_out, rows_received, rows_sent
from piper.runtime.pending import Act, Pending


def send(board: Board, x: Instruction, op: Transfer) -> Act:
    slots, name = board.slots, x.name
    (slot,) = x.reads
    messages = [
        (board.comm.send(x.node, x.stream, peer), part, parts)
        for peer, part, parts in rows_sent(op, board.device)
    ]
    if len(messages) == 1 and messages[0][2] == 1:
        ((begin, _, _),) = messages

        def whole() -> Pending:
            data = slots[slot].contiguous()
            return Pending(name, (begin(data),), keeps=(data,))

        return whole

    def act() -> Pending:
        data = slots[slot].contiguous()
        handles = [begin(data.chunk(parts)[part]) for begin, part, parts in messages]
        return Pending(name, handles, keeps=(data,))

    return act


def receive(board: Board, x: Instruction, op: Transfer) -> Act:
    where, name = board.where, x.name
    store = board.store
    (slot,) = x.writes
    spec = board.code.values[len(op.target)][x.of]
    messages = [
        (board.comm.receive(x.node, x.stream, peer), part, parts)
        for peer, part, parts in rows_received(op, board.device)
    ]

    def act() -> Pending:
        out = torch.empty(spec.shape, dtype=spec.dtype, device=where)
        handles = [
            begin(out.chunk(parts)[part] if parts > 1 else out) for begin, part, parts in messages
        ]

        def finish() -> None:
            store(slot, board.arrange(slot, out))

        return Pending(name, handles, finish)

    return act


def exchange(board: Board, x: Instruction, group: tuple[int, ...]) -> Act:
    slots, ways = board.slots, len(group)
    store = board.store
    begin = board.comm.all_to_all(x.node, x.stream, group)
    (slot,), (target,) = x.reads, x.writes
    pack, unpack = exchange_out(ways) if x.role is ExtraRole.EXCHANGED else exchange_back(ways)

    def act() -> Pending:
        data = pack(slots[slot])
        out = torch.empty_like(data)
        handle = begin(data, out)

        def finish() -> None:
            store(target, board.arrange(target, unpack(out)))

        return Pending(x.name, [handle], finish, keeps=(data,))

    return act
