"""Checks that the code of chunks, as read from files, is consistent. A ``MalformedError`` says what
is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from piper.base.reading import MalformedError, shown, within
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.code.executables import ChunkSignature, Executables
from piper.ir.passes import SAVED, Kind, Pass, Ref


def check_code(code: Executables) -> None:
    if not code.programs or 0 in code.programs or code.programs.keys() != code.values.keys():
        raise MalformedError("it is for groups of no size, or values are of other sizes")
    for n, specs in code.values.items():
        if len(code.programs[n]) != len(code.pieces):
            raise MalformedError(f"{len(code.pieces)} pieces, but {len(code.programs[n])} programs")
        counts = [] if code.count is None else [code.count]
        in_range([code.loss, *counts, *code.outputs.values()], len(specs), "value")
        for place, piece in enumerate(code.pieces):
            with within(f"pieces[{place}]"):
                in_range((*piece.inputs, *piece.outputs), len(specs), "value")
    for place, piece in enumerate(code.pieces):
        with within(f"pieces[{place}]"):
            known(piece.parameters, code.parameters, "parameter")
            known(piece.updates, piece.buffers, "buffer of the piece")
            for ends in (piece.inputs, piece.outputs, piece.parameters, piece.buffers):
                distinct(ends, "end")
    _order(code)
    if code.parameters.keys() != {name for piece in code.pieces for name in piece.parameters}:
        raise MalformedError("parameters: they are not those of its pieces")
    seen: set[tuple[int, int]] = set()
    for row in code.programs.values():
        for place, (piece, chunk) in enumerate(zip(code.pieces, row, strict=True)):
            if (place, id(chunk)) not in seen:
                seen.add((place, id(chunk)))
                with within(f"programs of {piece.name}"):
                    _refs(chunk, piece)


def _order(code: Executables) -> None:
    """Every value is made once, before it is read. Values that no piece makes are batch tensors."""
    made = [value for piece in code.pieces for value in piece.outputs]
    distinct(made, "output")
    for value in (code.loss, code.count):
        if value is not None and value not in made:
            raise MalformedError("no piece makes the loss, or what it is divided by")
    for name, value in code.outputs.items():
        if value not in made:
            raise MalformedError(f"no piece makes the output {shown(name)}")
    later = set(made)
    for place, piece in enumerate(code.pieces):
        if early := later.intersection(piece.inputs):
            raise MalformedError(f"pieces[{place}]: it takes value {min(early)} before it is made")
        later.difference_update(piece.outputs)


def _refs(chunk: ChunkProgram, piece: ChunkSignature) -> None:
    """The inputs and results of a program's passes match the signature of its piece."""
    ends = {
        Kind.PARAMETER: len(piece.parameters),
        Kind.PARAMETER_GRAD: len(piece.parameters),
        Kind.BUFFER: len(piece.buffers),
        Kind.UPDATE: len(piece.updates),
        Kind.INPUT: len(piece.inputs),
        Kind.INPUT_GRAD: len(piece.inputs),
        Kind.OUTPUT: len(piece.outputs),
        Kind.OUTPUT_GRAD: len(piece.outputs),
    }
    for ref in chunk.specs:
        if ref.kind in ends:
            in_range([ref.index], ends[ref.kind], ref.kind.value)
        before = Ref(ref.kind, ref.index, ref.term - 1)
        if ref.term and (ref.kind is not Kind.INPUT_GRAD or before not in chunk.specs):
            raise MalformedError(f"{ref} is a term of nothing, or not the next one")
    made = {
        Kind.SAVED: chunk.functions[Pass.F].results,
        Kind.SAVED_FOR_BW: chunk.functions[Pass.F].results,
        Kind.BI_SAVED: chunk.functions[Pass.BI].results if Pass.BI in chunk.functions else (),
    }
    for which, function in chunk.functions.items():
        for ref in function.arguments:
            if ref.kind in made and ref not in made[ref.kind]:
                raise MalformedError(f"the pass {which.value} reads {ref}, which no pass makes")
    for kind, refs in made.items():
        own = [ref for ref in refs if ref.kind is kind]
        if own != [Ref(kind, i) for i in range(len(own))]:
            raise MalformedError(f"its {kind.value} tensors are not numbered in order")
    _consumed(chunk)
    for kind, wanted in ((Kind.OUTPUT, piece.outputs), (Kind.UPDATE, piece.updates)):
        results = chunk.functions[Pass.F].results
        if {ref.index for ref in results if ref.kind is kind} != set(range(len(wanted))):
            raise MalformedError(f"the pass F does not make every {kind.value}")


def _consumed(chunk: ChunkProgram) -> None:
    """A pass overwrites only its own inputs, and none that a later pass reads."""
    functions = chunk.functions
    later = functions[Pass.BW].arguments if Pass.BW in functions else ()
    for which, function in functions.items():
        kept = later if which is Pass.BI else ()
        for ref in function.consumes:
            if which is Pass.F or ref.kind not in _OWN or ref in kept:
                raise MalformedError(f"the pass {which.value} must not overwrite {ref}")


_OWN = (*SAVED, Kind.BI_SAVED, Kind.INPUT)


def in_range(numbers: Sequence[int], count: int, what: str) -> None:
    for number in numbers:
        if not 0 <= number < count:
            raise MalformedError(f"there is no {what} {number}")


def distinct(items: Sequence[object], what: str) -> None:
    twice = [item for item, n in Counter(items).items() if n > 1]
    if twice:
        raise MalformedError(f"the {what} {shown(twice[0])} is there twice")


def known(names: Sequence[str], known: Collection[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise MalformedError(f"there is no {what} {shown(name)}")
