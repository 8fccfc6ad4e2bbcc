"""Puts all parts of a fold into a cut model that has only the first two."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from piper.capture.chunk.chunks import Chunk, Cut
from piper.capture.regions import Region
from piper.capture.repeats.folds import Fold, FoldPart, NotFolded, renamed

_SUFFIX = re.compile(r"_(\d+)$")
_Value = tuple[int, int]
"""A value: its part, counted from part 1, which all others are of, and its number before."""


def unfolded(cut: Cut, folds: Sequence[Fold]) -> Cut:
    """``cut`` with the chunks of all parts, as if all had been in the graph; raises ``NotFolded``
    if its two parts are not alike."""
    for fold in folds:
        cut = _Unfolding(cut, fold).cut()
    return cut


class _Unfolding:
    def __init__(self, cut: Cut, fold: Fold) -> None:
        self._cut, self._fold = cut, fold
        one, two, *others = fold.own()
        if self._chunks_in(set().union(*others)):
            raise NotFolded
        self._one, self._two = self._chunks_in(one), self._chunks_in(two)
        pairs = list(zip(self._one, self._two, strict=False))
        self._next = dict(
            zip(
                (x for chunk in self._one for x in chunk.outputs),
                (x for chunk in self._two for x in chunk.outputs),
                strict=False,
            )
        )
        """For each value that part 0 makes, the same of part 1."""
        self._made = {two: one for one, two in self._next.items()}
        start, size = self._one[0].index if self._one else 0, len(self._two)
        places = [chunk.index for chunk in (*self._one, *self._two)]
        alike = all(self._alike(one, two) for one, two in pairs)
        if (
            not size
            or len(pairs) != size
            or places != [*range(start, start + 2 * size)]
            or not alike
        ):
            raise NotFolded
        self._refuse_readers()

    def _chunks_in(self, regions: Collection[Region]) -> list[Chunk]:
        return [chunk for chunk in self._cut.chunks if not set(chunk.tags).isdisjoint(regions)]

    def _alike(self, one: Chunk, two: Chunk) -> bool:
        """Whether a chunk of part 1 is that of part 0, one part later."""
        first, second, *_ = self._fold.parts
        moved = _moved(one, first, second)
        return (
            (moved.tags, moved.parameters, moved.buffers) == (two.tags, two.parameters, two.buffers)
            and one.body.key == two.body.key
            and len(one.inputs) == len(two.inputs)
            and len(one.outputs) == len(two.outputs)
            and not (one.updates or two.updates)
            and all(map(self._follows, one.inputs, two.inputs))
            and all(map(self._equal, one.outputs, two.outputs))
        )

    def _follows(self, one: int, two: int) -> bool:
        """Whether an input of part 1 is that of part 0, one part later."""
        if two in self._made:
            return self._made[two] == one
        return one == two if two not in self._next else one not in {*self._next, *self._made}

    def _equal(self, one: int, two: int) -> bool:
        first, second = self._cut.values[one], self._cut.values[two]
        return first.spec == second.spec and _base(first.name) == _base(second.name)

    def _refuse_readers(self) -> None:
        """Refuse values of part 0 that others than the two parts read."""
        cut = self._cut
        parts = {chunk.index for chunk in (*self._one, *self._two)}
        read: set[int | None] = {
            x for chunk in cut.chunks if chunk.index not in parts for x in chunk.inputs
        }
        if not read.union([cut.loss, cut.count, *cut.outputs]).isdisjoint(self._next):
            raise NotFolded

    def cut(self) -> Cut:
        """The cut with all parts."""
        before, parts = self._cut, self._fold.parts
        last, end = len(parts) - 1, self._two[-1].index + 1
        chunks = [(chunk, 1) for chunk in before.chunks[:end]]
        for part in range(2, len(parts)):
            chunks += [(_moved(chunk, parts[1], parts[part]), part) for chunk in self._two]
        chunks += [(chunk, last) for chunk in before.chunks[end:]]
        values = [value for value in before.values if value.producer is None]
        numbers = {(1, value.index): i for i, value in enumerate(values)}
        new: list[Chunk] = []
        for chunk, part in chunks:
            inputs = tuple(numbers[self._of(x, part)] for x in chunk.inputs)
            outputs = tuple(range(len(values), len(values) + len(chunk.outputs)))
            for x, number in zip(chunk.outputs, outputs, strict=True):
                numbers[self._of(x, part)] = number
                name = self._name(x, part)
                values.append(replace(before.values[x], index=number, name=name, producer=len(new)))
            new.append(replace(chunk, index=len(new), inputs=inputs, outputs=outputs))
        return before.renumbered(new, values, lambda x: numbers[self._of(x, last)])

    def _of(self, value: int, part: int) -> _Value:
        """The value that a chunk of ``part`` reads or makes where that of part 1 does ``value``."""
        if value in self._next and part > 1:
            return part - 1, self._next[value]
        return (part if value in self._made else 1), value

    def _name(self, value: int, part: int) -> str:
        """The name that tracing all parts would give."""
        name = self._cut.values[value].name
        if value not in self._made or part == 1:
            return name
        first, second = (_number(self._cut.values[x].name) for x in (self._made[value], value))
        return f"{_base(name)}_{second + (part - 1) * (second - first)}"


def _moved(chunk: Chunk, one: FoldPart, two: FoldPart) -> Chunk:
    """A chunk of part ``one`` as the same of part ``two``."""
    regions = dict(zip(one.regions, two.regions, strict=True))
    return replace(
        chunk,
        tags=tuple(regions.get(tag, tag) for tag in chunk.tags),
        parameters=tuple(renamed(name, one, two) for name in chunk.parameters),
        buffers=tuple(renamed(name, one, two) for name in chunk.buffers),
    )


def _base(name: str) -> str:
    return _SUFFIX.sub("", name)


def _number(name: str) -> int:
    """The number at the end of a name; the first name of its kind has none."""
    suffix = _SUFFIX.search(name)
    return int(suffix[1]) if suffix else 0
