"""COMPUTE: one pass of a chunk. Its inputs and outputs are resolved when the plan is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.ir.ops import Compute
from piper.ir.passes import BUNDLES, Kind, Ref
from piper.ir.plan.instructions import Instruction
from piper.ir.shards import RANK, Draws
from piper.ir.tensors import TensorSpec
from piper.runtime.context import ExecutionContext, Made
from piper.runtime.draw_seeds import fold, seeded, skip
from piper.runtime.instructions.grad_arena import GradArena
from piper.runtime.pending import BoundInstruction
from piper.runtime.streams.streams import Free


def compute(
    context: ExecutionContext, x: Instruction, op: Compute, last: Sequence[int], free: Free
) -> BoundInstruction:
    """The slots in ``last`` have no later reader: their tensors are freed as soon as the program
    has used them."""
    parts = x.rows.parts
    program = context.code.programs[parts][op.chunk]
    function = program.functions[op.which]
    piece = context.code.pieces[op.chunk]
    run = context.runners.get(program, op.which)
    slots, kinds, read = context.slots, context.plan.slots, context.read(x, op)
    extra = x.reads[len(read) :]
    gathered = {kinds[slot].bucket: slot for slot in extra}
    fixed: list[Any] = []
    direct: list[tuple[int, int]] = []
    nested: list[tuple[int, int, Any]] = []
    for position, ref in enumerate(function.arguments):
        fixed.append(None)
        if ref.kind is Kind.PARAMETER:
            name = piece.parameters[ref.index]
            if name in context.state.views:
                fixed[position] = context.state.views[name]
            else:
                nested.append((position, gathered[context.state.bucket_of[name]], name))
        elif ref.kind is Kind.BUFFER and (name := piece.buffers[ref.index]).startswith(RANK):
            rank = _rank(x, name.removeprefix(RANK), context.device)
            fixed[position] = torch.tensor(rank, device=context.where)
        elif ref.kind is Kind.BUFFER:
            fixed[position] = context.buffer(name)
        elif ref.kind in BUNDLES:
            nested.append((position, read[Ref(ref.kind, 0)], ref.index))
        else:
            direct.append((position, read[ref]))
    written = context.written(x, op)
    single = [(made.slot, made.places[0]) for made in written if not made.bundle]
    bundles = [(m.slot, m.places) for m in written if m.bundle and m.slot not in x.adds]
    adds = [(m.slot, m.places) for m in written if m.slot in x.adds]
    first = [m for m in written if kinds[m.slot].names and m.slot not in x.adds]
    specs = [program.specs[ref] for ref in function.results]
    allocates = _allocates(context, x, first, specs)
    alone = [(m.slot, m.places) for m in first if m.slot in x.allocates]
    lying = [lies for m in first for lies in _lying(context, m)]
    casts = _casts(context, [m for m in first if m.slot not in x.allocates], specs)
    into = [(i, specs[i].dtype) for i in context.runners.compiler.into(function)]
    ties = _ties(context, [slot for slot in extra if kinds[slot].names], written)
    updates = [
        (context.buffer(piece.updates[r.index]), i)
        for i, r in enumerate(function.results)
        if r.kind is Kind.UPDATE
    ]

    def execute() -> None:
        arguments = fixed.copy()
        for position, slot in direct:
            arguments[position] = slots[slot]
        for position, slot, key in nested:
            arguments[position] = slots[slot][key]
        for slot in last:
            free(slot)
        for slot, make in allocates:
            slots[slot] = make()
        home: dict[int, Tensor] = {}
        for i, slot, view, name in lying:
            home[i] = view(slots[slot], name)
        for slot, places in alone:
            home |= zip(places, slots[slot], strict=True)
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
        for slot, dtypes in casts:
            slots[slot] = [x.to(dtype) for x, dtype in zip(slots[slot], dtypes, strict=True)]
        for slot, places in adds:
            torch._foreach_add_(slots[slot], [results[i] for i in places])
        if updates:
            context.state.changing = True
        for buffer, i in updates:
            buffer.copy_(results[i])

    if not function.random:
        return execute
    state, where, generator = context.state, context.where, context.generator
    part = op.microbatch * parts + x.rows.part(context.device)

    draws = piece.draws or Draws(op.chunk)

    def drawing() -> None:
        seed = fold(state.training.seed, step=state.steps, chunk=draws.chunk, microbatch=part)
        with seeded(generator, seed):
            for draw in draws.before:
                skip(draw, where)
            execute()

    return drawing


def _rank(x: Instruction, axis: str, device: int) -> int:
    stride, ways = next((stride, ways) for name, stride, ways in x.axes if name == axis)
    return x.rows.devices.index(device) // stride % ways


def _allocates(
    context: ExecutionContext, x: Instruction, first: Sequence[Made], specs: Sequence[TensorSpec]
) -> list[tuple[int, Callable[[], Any]]]:
    """The gradient accumulation slots that begin here, each with the function that allocates it."""
    allocates: list[tuple[int, Callable[[], Any]]] = []
    places = {made.slot: made.places for made in first}
    for slot in x.allocates:
        if slot not in places:
            allocates.append((slot, context.buffer_maker(slot)))
            continue
        mine = [specs[i] for i in places[slot]]
        together = GradArena(mine, context.plan.slots[slot].dtypes, context.where)
        allocates.append((slot, together.empty))
    return allocates


def _lying(
    context: ExecutionContext, made: Made
) -> Iterator[tuple[int, int, Callable[[Tensor, str], Tensor], str]]:
    """The gradients of a slot that are stored in buckets' buffers: index among the program's
    results, slot of the buffer, the function that views it there, and parameter name."""
    kind = context.plan.slots[made.slot]
    for slot in kind.lies_in:
        buffer = context.plan.slots[slot]
        assert buffer.bucket is not None
        view = context.state.held[buffer.bucket].layout.view
        for place, name in zip(made.places, kind.names, strict=True):
            if name in buffer.names:
                yield place, slot, view, name


def _casts(
    context: ExecutionContext, first: Sequence[Made], specs: Sequence[TensorSpec]
) -> list[tuple[int, tuple[torch.dtype, ...]]]:
    """The slots whose gradients the program computes in other dtypes than the slot has, each with
    its dtypes."""
    pairs = [(made, context.plan.slots[made.slot].dtypes) for made in first]
    return [
        (made.slot, dtypes)
        for made, dtypes in pairs
        if dtypes != tuple(specs[i].dtype for i in made.places)
    ]


def _fitting(home: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``home`` if a program can write into it, else None."""
    return home if home is not None and home.dtype is dtype and home.is_contiguous() else None


def _moved(results: Sequence[Tensor], home: dict[int, Tensor]) -> list[Tensor]:
    """``results``, moved to their memory in ``home`` where they have one."""
    away = [i for i, at in home.items() if results[i] is not at]
    if away:
        torch._foreach_copy_([home[i] for i in away], [results[i] for i in away])
    return [home.get(i, result) for i, result in enumerate(results)]


def _ties(
    context: ExecutionContext, later: list[int], written: list[Made]
) -> list[tuple[int, int, int]]:
    """Gradients of tied parameters from later chunks: the slot, the index in it, and the index of
    the result that is added to it."""
    names = [slot.names for slot in context.plan.slots]
    mine = {name: i for m in written for name, i in zip(names[m.slot], m.places, strict=False)}
    return [
        (slot, key, mine[name])
        for slot in later
        for key, name in enumerate(names[slot])
        if name in mine
    ]
