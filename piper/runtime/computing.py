"""A pass of a chunk as a function of no arguments: everything it needs is resolved here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.capture.program import BUNDLES, Kind, Ref
from piper.capture.tensors import TensorSpec
from piper.ir.dag import Compute
from piper.lower.plan import Instruction
from piper.random import fold, seeded
from piper.runtime.board import Board, Made
from piper.runtime.pending import Act
from piper.runtime.streams import Free
from piper.runtime.together import Together


def compute(board: Board, x: Instruction, op: Compute, last: Sequence[int], free: Free) -> Act:
    """It is the last reader of the slots in ``last``, whose tensors go as soon as the program has
    used them."""
    group = len(x.group)
    program = board.code.programs[group][op.chunk]
    function = program.functions[op.which]
    piece = board.code.pieces[op.chunk]
    run = board.runners.get(program, op.which)
    slots, read = board.slots, board.read(x)
    extra = x.reads[len(read) :]
    gathered = {board.buckets[slot]: slot for slot in extra if slot in board.buckets}
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
    written = board.written(x, op)
    single = [(made.slot, made.places[0]) for made in written if not made.bundle]
    bundles = [(m.slot, m.places) for m in written if m.bundle and m.slot not in x.adds]
    adds = [(m.slot, m.places) for m in written if m.slot in x.adds]
    master = board.state.program.training.master
    first = [m for m in written if m.names and m.slot not in x.adds]
    widened = [m.slot for m in first if master]
    specs = [program.specs[ref] for ref in function.results]
    homes = [home for m in first if (home := _home(board, m, specs)) is not None]
    into = [(i, specs[i].dtype) for i in board.runners.compiler.into(function)]
    ties = _ties(board, [slot for slot in extra if slot in board.grads], written)
    updates = [
        (board.buffer(piece.updates[r.index]), i)
        for i, r in enumerate(function.results)
        if r.kind is Kind.UPDATE
    ]

    def act() -> None:
        arguments = fixed.copy()
        for position, slot in direct:
            arguments[position] = slots[slot]
        for position, slot, key in nested:
            arguments[position] = slots[slot][key]
        for slot in last:
            free(slot)
        home: dict[int, Tensor] = {}
        for make in homes:
            home |= make()
        if home:
            arguments += [_fitting(home.get(i), dtype) for i, dtype in into]
        results = run(arguments)
        if ties:
            results = list(results)
            for slot, key, i in ties:
                results[i] = slots[slot][key].add_(results[i])
        if home:
            results = _moved(results, home)
        for slot, i in single:
            slots[slot] = results[i]
        for slot, places in bundles:
            slots[slot] = [results[i] for i in places]
        for slot in widened:
            slots[slot] = [gradient.to(master) for gradient in slots[slot]]
        for slot, places in adds:
            torch._foreach_add_(slots[slot], [results[i] for i in places])
        if updates:
            board.state.changing = True
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


def _home(
    board: Board, made: Made, specs: Sequence[TensorSpec]
) -> Callable[[], dict[int, Tensor]] | None:
    """Gives, for places among a program's results, where gradients are that are added to."""
    if made.slot in board.sums:
        return lambda: {made.places[i]: at for i, at in board.homes(made.slot)}
    if made.slot in board.growing:
        master = board.state.program.training.master
        together = Together([specs[i] for i in made.places], master, board.where)
        return lambda: dict(zip(made.places, together.empty(), strict=True))
    return None


def _fitting(home: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``home``, if a program can write into it."""
    return home if home is not None and home.dtype is dtype and home.is_contiguous() else None


def _moved(results: Sequence[Tensor], home: dict[int, Tensor]) -> list[Tensor]:
    """``results``, of which those that have a home are there."""
    away = [i for i, at in home.items() if results[i] is not at]
    if away:
        torch._foreach_copy_([home[i] for i in away], [results[i] for i in away])
    return [home.get(i, result) for i, result in enumerate(results)]


def _ties(board: Board, later: list[int], written: list[Made]) -> list[tuple[int, int, int]]:
    """The gradients of tied parameters that later chunks made: slot, place there, and the place
    among the results of what is added to it."""
    mine = {name: i for made in written for name, i in zip(made.names, made.places, strict=False)}
    return [
        (slot, key, mine[name])
        for slot in later
        for key, name in enumerate(board.grads[slot])
        if name in mine
    ]


def _seed(board: Board, spec: Any, group: int) -> Tensor:
    """The gradient of one device's loss of one microbatch."""
    seed = torch.ones(spec.shape, dtype=spec.dtype, device=board.where)
    return seed if board.code.count is not None else seed.div_(board.parts * group)
