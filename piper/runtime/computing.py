"""A pass of a chunk as a function of no arguments: everything it needs is resolved here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piper.capture.program import Kind, Ref
from piper.ir.dag import Compute
from piper.ir.facts import bundled
from piper.lower.plan import Instruction
from piper.random import fold, seeded
from piper.runtime.board import BUNDLES, Board
from piper.runtime.pending import Act


def compute(board: Board, x: Instruction, op: Compute) -> Act:
    group = len(x.group)
    program = board.code.programs[group][op.chunk]
    function = program.functions[op.which]
    piece = board.code.pieces[op.chunk]
    run = board.runners.get(program, op.which)
    slots, read = board.slots, board.read(x)
    gathered = {board.buckets[slot]: slot for slot in x.reads[len(read) :]}
    fixed: list[Any] = []
    direct: list[tuple[int, int]] = []
    nested: list[tuple[int, int, Any]] = []
    for position, ref in enumerate(function.arguments):
        fixed.append(None)
        if ref.kind is Kind.PARAMETER:
            name = piece.parameters[ref.index]
            if name in board.state.views:
                fixed[position] = board.state.views[name]
            else:
                nested.append((position, gathered[board.state.bucket_of[name]], name))
        elif ref.kind is Kind.BUFFER:
            fixed[position] = board.buffer(piece.buffers[ref.index])
        elif board.is_seed(op.chunk, ref):
            fixed[position] = _seed(board, program.specs[ref], group)
        elif ref.kind in BUNDLES:
            nested.append((position, read[Ref(ref.kind, 0)], ref.index))
        else:
            direct.append((position, read[ref]))
    made = dict(zip(bundled(function.results), x.writes, strict=True))
    single = [
        (made[r], i) for i, r in enumerate(function.results) if r in made and r.kind not in BUNDLES
    ]
    bundles = [
        (slot, [i for i, r in enumerate(function.results) if r.kind is ref.kind])
        for ref, slot in made.items()
        if ref.kind in BUNDLES and slot not in x.adds
    ]
    adds = [
        (slot, [i for i, r in enumerate(function.results) if r.kind is ref.kind])
        for ref, slot in made.items()
        if slot in x.adds
    ]
    updates = [
        (board.buffer(piece.updates[r.index]), i)
        for i, r in enumerate(function.results)
        if r.kind is Kind.UPDATE
    ]
    master = board.state.program.training.master
    gradients = {s for r, s in made.items() if r.kind is Kind.PARAMETER_GRAD and master}

    def act() -> None:
        arguments = fixed.copy()
        for position, slot in direct:
            arguments[position] = slots[slot]
        for position, slot, key in nested:
            arguments[position] = slots[slot][key]
        results = run(arguments)
        for slot, i in single:
            slots[slot] = results[i]
        for slot, places in bundles:
            slots[slot] = [results[i] for i in places]
            if slot in gradients:
                slots[slot] = [g.to(master) for g in slots[slot]]
        for slot, places in adds:
            torch._foreach_add_(slots[slot], [results[i] for i in places])
        for buffer, i in updates:
            buffer.copy_(results[i])

    if not function.random:
        return act
    state, where = board.state, board.where
    part = op.microbatch * group + x.group.index(board.device)

    def drawing() -> None:
        draws = fold(state.program.training.seed, step=state.steps, chunk=op.chunk, microbatch=part)
        with seeded(where, draws):
            act()

    return drawing


def _seed(board: Board, spec: Any, group: int) -> Tensor:
    """The gradient of one device's loss of one microbatch."""
    seed = torch.ones(spec.shape, dtype=spec.dtype, device=board.where)
    return seed if board.code.count is not None else seed.div_(board.parts * group)
