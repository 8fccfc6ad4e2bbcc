"""Makes a table of a captured model's chunks, and a one-line summary.

All sizes are for one microbatch and come from the chunk programs: nothing runs or is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from string import ascii_uppercase
from typing import TYPE_CHECKING

from piper.capture.chunk.chunks import Chunk
from piper.capture.code.chunk_program import ChunkProgram
from piper.capture.model import Captured
from piper.ir.passes import Kind, Pass, Ref

if TYPE_CHECKING:  # every worker imports this file but prints no table
    from rich.table import Table

_CAPTION = (
    "Of one microbatch: bytes a chunk outputs, saves in F just for its backward, and holds for it "
    "of its inputs and outputs (each tensor once in the total); FLOPs of the passes F, BI and BW "
    "in matrix products, convolutions and attention (–: no such pass)."
)


def chunk_table(captured: Captured, *, fold: bool = False) -> Table:
    """A table with one row per chunk. With ``fold``, repeated groups of chunks, such as layers, are
    listed once, and the column × gives their number."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False, show_footer=True)
    table.caption = Text(_CAPTION, style="dim italic")
    table.caption_justify = "left"
    letters = letters_of(captured)
    footer = _sizes(captured, range(len(captured.chunks)))
    table.add_column("#", justify="right", style="dim", no_wrap=True)
    table.add_column("region", "total", overflow="fold")
    if fold:
        table.add_column("×", justify="right", style="dim", no_wrap=True)
    table.add_column("prog", justify="center", style="bold", no_wrap=True)
    for header, total in zip(_SIZES, footer, strict=True):
        table.add_column(header, total, justify="right", no_wrap=True)
    singles = ((index, 1, 1) for index in range(len(captured.chunks)))
    for start, period, count in _groups(captured) if fold else singles:
        for index in range(start, start + period):
            chunks = captured.chunks[index : index + period * count : period]
            times = [str(count) if count > 1 else ""] if fold else []
            name = Text(_name(chunks))  # not markup: names contain brackets around indices
            sizes = _sizes(captured, [index])
            table.add_row(str(index), name, *times, letters[captured.programs[index]], *sizes)
    return table


def summary(captured: Captured) -> str:
    """The number of chunks and of distinct programs, the bytes saved for the backward per
    microbatch, and the FLOPs of a step."""
    saved = sum(program.saved_bytes for program in captured.programs)
    flops = sum(_flops(p, Pass.F) + _flops(p, Pass.B) for p in captured.programs)
    return (
        f"{len(captured.chunks)} chunks, {len(captured.unique_programs)} unique programs, "
        f"{_si(saved)}B saved per microbatch, {_si(flops * captured.microbatches)}FLOP per step"
    )


_SIZES = ("params", "bytes", "outputs", "saved", "held", "F", "BI", "BW")
_SHOWN = (Pass.F, Pass.BI, Pass.BW)


def _sizes(captured: Captured, indices: Iterable[int]) -> list[str]:
    """The columns of some chunks together. A parameter or value that several of them use counts
    once."""
    chunks = [(captured.chunks[i], captured.programs[i]) for i in indices]
    parameters = {
        name: program.specs[Ref(Kind.PARAMETER, i)]
        for chunk, program in chunks
        for i, name in enumerate(chunk.parameters)
    }.values()
    held = {
        (chunk.inputs if ref.kind is Kind.INPUT else chunk.outputs)[ref.index]
        for chunk, program in chunks
        for ref in program.held(Pass.B)
        if ref.kind in (Kind.INPUT, Kind.OUTPUT)
    }
    outputs = (value for chunk, _ in chunks for value in chunk.outputs)
    own, after = (
        sum(captured.cut.values[value].spec.nbytes for value in values)
        for values in (outputs, held)
    )
    passes = [[p.functions.get(which) for _, p in chunks] for which in _SHOWN]
    return [
        _si(sum(spec.numel for spec in parameters)),
        f"{_si(sum(spec.nbytes for spec in parameters))}B",
        f"{_si(own)}B",
        f"{_si(sum(program.saved_bytes for _, program in chunks))}B",
        f"{_si(after)}B",
        *(_si(sum(f.flops for f in row if f)) if any(row) else "–" for row in passes),
    ]


def _flops(program: ChunkProgram, which: Pass) -> int:
    function = program.functions.get(which)
    return 0 if function is None else function.flops


def letters_of(captured: Captured) -> dict[ChunkProgram, str]:
    """Names A, B, …, Z, A1, B1, … of the programs, in the order of their first chunks."""
    names = {}
    for number, program in enumerate(captured.unique_programs):
        turn, letter = divmod(number, len(ascii_uppercase))
        names[program] = ascii_uppercase[letter] + (str(turn) if turn else "")
    return names


RepeatedChunks = tuple[int, int, int]
"""The index of the first chunk, the number of chunks in a group, and the number of repetitions."""


def _groups(captured: Captured) -> Iterable[RepeatedChunks]:
    """The chunks in order, with repetitions of whole outermost regions merged."""
    chunks = captured.chunks
    kinds = [
        (tuple(region.name for region in chunk.tags), program)
        for chunk, program in zip(chunks, captured.programs, strict=True)
    ]
    borders = [
        i for i in range(len(chunks)) if i == 0 or chunks[i].tags[:1] != chunks[i - 1].tags[:1]
    ]
    index = 0
    while index < len(chunks):
        period, count = 1, 1
        if index in borders:
            periods = (border - index for border in borders if border > index)
            repeats = ((p, _repeats(kinds, index, p)) for p in periods)
            period, count = next(((p, n) for p, n in repeats if n > 1), (1, 1))
        yield index, period, count
        index += period * count


def _repeats(kinds: Sequence[object], start: int, period: int) -> int:
    """How often the ``period`` items at ``start`` repeat consecutively."""
    first = kinds[start : start + period]
    count = 1
    while kinds[start + count * period : start + (count + 1) * period] == first:
        count += 1
    return count


def _name(chunks: Sequence[Chunk]) -> str:
    """The region name of the chunks, with index ranges if there are several."""
    first, last = chunks[0], chunks[-1]
    if first is last:
        return first.name
    pairs = zip(first.tags, last.tags, strict=True)
    return "/".join(str(a) if a == b else f"{a.name}[{a.index}…{b.index}]" for a, b in pairs)


def _si(number: float) -> str:
    """Two or three digits and a prefix: 950, 1.2k, 68M."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5:
            return f"{number:.1f}{prefix}" if prefix and number < 9.95 else f"{number:.0f}{prefix}"
        number /= 1000
    return f"{number:.0f}E"
