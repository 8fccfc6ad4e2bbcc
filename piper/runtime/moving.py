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
    slots, comm = board.slots, board.comm
    (slot,) = x.reads
    messages = rows_sent(op, board.device)

    def act() -> Pending:
        data = slots[slot].contiguous()
        handles = [
            comm.send(x.node, x.stream, peer, data.chunk(parts)[part] if parts > 1 else data)
            for peer, part, parts in messages
        ]
        return Pending(x.name, handles)

    return act


def receive(board: Board, x: Instruction, op: Transfer) -> Act:
    comm, where = board.comm, board.where
    store = board.store
    (slot,) = x.writes
    spec = board.code.values[len(op.target)][x.of]
    messages = rows_received(op, board.device)

    def act() -> Pending:
        out = torch.empty(spec.shape, dtype=spec.dtype, device=where)
        handles = [
            comm.receive(x.node, x.stream, peer, out.chunk(parts)[part] if parts > 1 else out)
            for peer, part, parts in messages
        ]

        def finish() -> None:
            store(slot, board.arrange(slot, out))

        return Pending(x.name, handles, finish)

    return act


def exchange(board: Board, x: Instruction, group: tuple[int, ...]) -> Act:
    slots, comm, ways = board.slots, board.comm, len(group)
    store = board.store
    (slot,), (target,) = x.reads, x.writes
    pack, unpack = exchange_out(ways) if x.role is ExtraRole.EXCHANGED else exchange_back(ways)

    def act() -> Pending:
        data = pack(slots[slot])
        out = torch.empty_like(data)
        handle = comm.all_to_all(x.node, x.stream, group, data, out)

        def finish() -> None:
            store(target, board.arrange(target, unpack(out)))

        return Pending(x.name, [handle], finish)

    return act
