"""Filters: which nodes a directive applies to.

A filter is a mapping from tag name to a number, a list or range of numbers, ``"*"`` (has the tag)
or ``"-"`` (does not have it); ``PASS`` takes the names of passes. The empty filter matches all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import PASS, Dag, Tag, Tags
from piper.ir.grouped import grouped
from piper.ir.passes import Pass

FilterLike = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Term:
    """A condition on one tag: its value is in ``values``, or, if None, it is present or absent."""

    name: str
    values: frozenset[Tag] | None
    present: bool
    written: str

    def accepts(self, tag: Tag | None) -> bool:
        """Whether a node may have this value of the tag; None: it does not have the tag."""
        if self.values is None:
            return (tag is not None) is self.present
        return tag in self.values


@dataclass(frozen=True, slots=True)
class Filter:
    """A conjunction of terms."""

    terms: tuple[Term, ...]

    @staticmethod
    def of(where: FilterLike, known: dict[tuple[str, object], Term] | None = None) -> Filter:
        """The filter as the user wrote it. ``known`` keeps terms, for other filters."""
        if not isinstance(where, Mapping):
            raise DirectiveError(
                f"a filter is a mapping from tag to value, such as {{'PP': 0}}, not {where!r}"
            )
        terms: dict[tuple[str, object], Term] = {} if known is None else known
        found = []
        for name, value in where.items():
            term = terms.get((name, value)) if type(value) in (int, str) else None
            if term is None:
                term = _term(name, value)
                if type(value) in (int, str):
                    terms[name, value] = term
            found.append(term)
        return Filter(tuple(found))

    def accepts(self, tags: Tags) -> bool:
        return all(term.accepts(tags.get(term.name)) for term in self.terms)

    def without(self, name: str) -> Filter:
        """The filter without its terms on one tag."""
        return Filter(tuple(term for term in self.terms if term.name != name))

    def __str__(self) -> str:
        return "{" + ", ".join(f"{t.name!r}: {t.written}" for t in self.terms) + "}"


class TagIndex:
    """Finds the nodes of many filters on the same tags without a scan of all nodes per filter."""

    def __init__(self, dag: Dag, numbers: Sequence[int]) -> None:
        """Of the nodes ``numbers``."""
        self._of, self._tags = numbers, [dag.nodes[number].tags for number in numbers]
        self._by_tags: dict[tuple[str, ...], dict[tuple[Tag | None, ...], list[int]]] = {}

    def matching(self, where: Filter) -> list[int]:
        """The numbers of the matching nodes, in order."""
        terms = where.terms
        numbers = self._numbers(tuple([term.name for term in terms]))
        values = [term.values for term in terms if term.values is not None]
        if len(values) == len(terms) and math.prod(map(len, values)) <= len(numbers):
            keys: Iterable[tuple[Tag | None, ...]] = itertools.product(*values)
        else:
            keys = [k for k in numbers if all(t.accepts(x) for t, x in zip(terms, k, strict=True))]
        rows = [numbers[key] for key in keys if key in numbers]
        return rows[0] if len(rows) == 1 else sorted(itertools.chain.from_iterable(rows))

    def _numbers(self, names: tuple[str, ...]) -> dict[tuple[Tag | None, ...], list[int]]:
        """The numbers of the nodes by the values of some tags."""
        if names not in self._by_tags:
            columns = [[tags.get(name) for tags in self._tags] for name in names]
            keys = zip(*columns, strict=True) if names else itertools.repeat((), len(self._of))
            self._by_tags[names] = grouped(zip(keys, self._of, strict=True))
        return self._by_tags[names]


def select(dag: Dag, where: Filter) -> list[int]:
    """The numbers of the matching nodes; an unknown tag or no match is an error."""
    numbers: Sequence[int] = range(len(dag.nodes))
    for term in where.terms:
        name, values = term.name, term.values
        tags = ((number, dag.nodes[number].tags.get(name)) for number in numbers)
        if values is not None:
            numbers = [number for number, tag in tags if tag in values]
        else:
            numbers = [number for number, tag in tags if (tag is not None) is term.present]
    for term in where.terms:
        if not (numbers and term.present) and term.name not in dag.tag_values:
            raise DirectiveError(
                f"the filter {where} names an unknown tag {term.name!r}; there are: {_known(dag)}"
            )
    if not numbers:
        raise DirectiveError(f"the filter {where} matches nothing; there are: {_known(dag)}")
    return [*numbers]


def _term(name: str, value: Any) -> Term:
    if isinstance(value, str) and value in ("*", "-"):
        return Term(name, None, value == "*", repr(value))
    several = not isinstance(value, int | str) and isinstance(value, Iterable)
    items = list(value) if several else [value]
    if not items:
        raise DirectiveError(f"the filter asks {name!r} to be one of an empty list: {value!r}")
    tags = frozenset([_tag(name, item) for item in items])
    return Term(name, tags, True, repr(list(value)) if several else repr(value))


def _tag(name: str, item: Any) -> Tag:
    if name == PASS:
        if isinstance(item, str) and item in Pass.__members__:
            return Pass[item]
        raise DirectiveError(f"PASS is one of {', '.join(Pass.__members__)}, not {item!r}")
    if isinstance(item, int) and not isinstance(item, bool):
        return item
    raise DirectiveError(
        f"the filter asks {name!r} to be {item!r}: give a number, a list or range of numbers, "
        "'*' (has the tag) or '-' (does not have it)"
    )


def _known(dag: Dag) -> str:
    return "; ".join(f"{name} {_range(values)}" for name, values in dag.tag_values.items())


def _range(values: Iterable[Tag]) -> str:
    passes = [p.value for p in Pass if p in values]
    if passes:
        return ", ".join(passes)
    numbers: Sequence[int] = sorted(v for v in values if isinstance(v, int))
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}..{numbers[-1]}"
    return ", ".join(map(str, numbers))
