"""Marks inputs that only one chunk needs: its backward may write its results over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from piper.capture.chunk.chunks import Cut
from piper.capture.code.chunk_program import ChunkProgram, Function
from piper.capture.graphs import base_of, returned
from piper.ir.passes import Kind, Pass, Ref


def consume_inputs(cut: Cut, programs: Sequence[ChunkProgram]) -> tuple[ChunkProgram, ...]:
    """The programs, with an input marked as consumed if every chunk that uses the program owns it.

    A chunk owns an input that another chunk made for it alone: no other chunk reads it, it is not a
    result of the step, its producer keeps nothing in the same storage, and no result of the
    chunk's forward is a view of it.
    """
    readers = Counter(value for chunk in cut.chunks for value in set(chunk.inputs))
    results = {cut.loss, cut.count, *cut.outputs}
    fresh: set[int] = set()
    for chunk, program in zip(cut.chunks, programs, strict=True):
        fresh |= {chunk.outputs[i] for i in _fresh_outputs(program)}
    owned: dict[ChunkProgram, frozenset[int]] = {}
    for chunk, program in zip(cut.chunks, programs, strict=True):
        passed_on = _inputs_passed_on(program)
        mine = frozenset(
            i
            for i, value in enumerate(chunk.inputs)
            if value in fresh
            and readers[value] == 1
            and value not in results
            and i not in passed_on
        )
        owned[program] = owned.get(program, mine) & mine
    made = {p: p.consuming({Ref(Kind.INPUT, i) for i in mine}) for p, mine in owned.items()}
    return tuple(made[program] for program in programs)


def private_results(function: Function) -> tuple[Ref, ...]:
    """Results that share memory with no argument and no other result."""
    bases = [base_of(node) for node in returned(function.module.graph)]
    results = Counter(bases)
    return tuple(
        ref
        for ref, base in zip(function.results, bases, strict=True)
        if base.op == "call_function" and results[base] == 1
    )


def _fresh_outputs(program: ChunkProgram) -> list[int]:
    """Outputs that share storage with nothing else and that the backward does not read."""
    read_back = {ref for f in program.functions.values() for ref in f.arguments}
    private = private_results(program.functions[Pass.F])
    return [ref.index for ref in private if ref.kind is Kind.OUTPUT and ref not in read_back]


def _inputs_passed_on(program: ChunkProgram) -> set[int]:
    """Inputs whose storage a result of the forward shares."""
    forward = program.functions[Pass.F]
    graph = forward.module.graph
    placeholders = graph.find_nodes(op="placeholder")
    refs = dict(zip(placeholders, forward.arguments, strict=True))
    bases = (base_of(node) for node in returned(graph))
    shared = (refs[base] for base in bases if base in refs)
    return {ref.index for ref in shared if ref.kind is Kind.INPUT}
