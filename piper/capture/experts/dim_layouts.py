"""Tracks the experts and rows of a region in the dimensions of a tensor.

A dimension is a product of factors, outermost first: ``[experts, rows, 64]`` flattened over its
first two dimensions has one dimension experts x rows. Reshaping regroups factors. An operation that
splits experts or rows, or pairs them with another factor, raises ``Mixed``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction


class Axis(Enum):
    """The axes along which devices hold different parts."""

    EXPERTS = "experts"
    ROWS = "rows"


class Mixed(Exception):  # noqa: N818 - a finding, which becomes an error where the region is known
    """An operation does not treat each expert, or each row, by itself."""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis.value)
        self.axis = axis


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of a dimension: all experts, all rows, or a size that is the same on every share."""

    size: int
    axis: Axis | None = None
    repeated: bool = False
    """Whether all elements along it are the same, as after ``expand``."""


Dim = tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class DimLayout:
    """The factors of each dimension of a tensor."""

    dims: tuple[Dim, ...]

    @staticmethod
    def of(shape: Sequence[int], axes: dict[int, Axis] | None = None) -> DimLayout:
        """The layout of a tensor with experts or rows along the dimensions in ``axes``."""
        named = axes or {}
        return DimLayout(tuple(_dim(size, named.get(i)) for i, size in enumerate(shape)))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Its axes, in the order of its dimensions."""
        return tuple(f.axis for dim in self.dims for f in dim if f.axis is not None)

    def axis(self, dim: int) -> Axis | None:
        """The outermost axis in a dimension, if any."""
        return next((f.axis for f in self.dims[dim] if f.axis is not None), None)

    def plain(self, dims: Iterable[int]) -> None:
        """Refuse an operation along ``dims`` if one of them holds experts or rows."""
        for dim in dims:
            axis = self.axis(dim)
            if axis is not None:
                raise Mixed(axis)

    def at(self, dim: int, new: Sequence[Dim]) -> DimLayout:
        """This layout with the dimensions ``new`` in place of ``dim``."""
        where = dim % len(self.dims)
        return DimLayout((*self.dims[:where], *new, *self.dims[where + 1 :]))

    def with_rows(self, times: Fraction) -> DimLayout:
        """This layout with ``times`` as many rows."""
        return DimLayout(
            tuple(
                tuple(
                    replace(f, size=int(f.size * times)) if f.axis is Axis.ROWS else f for f in dim
                )
                for dim in self.dims
            )
        )

    def shape(self, ways: int) -> tuple[int, ...]:
        """The shape on one of ``ways`` shares: fewer experts, the rows of all devices."""
        return tuple(math.prod(_shared(f, ways) for f in dim) for dim in self.dims)

    def viewed(self, shape: Sequence[int]) -> DimLayout:
        """The layout of a view with another ``shape``."""
        left = _merged(f for dim in self.dims for f in dim)
        dims = []
        for size in shape:
            dim, left = _take(left, size)
            dims.append(dim)
        for factor in left:
            if factor.axis is not None:  # an axis of size 1, and no dimension left for it
                raise Mixed(factor.axis)
        return DimLayout(tuple(dims))


def broadcast(layouts: Sequence[DimLayout]) -> DimLayout:
    """The layout of an elementwise operation's result from operands with ``layouts``."""
    rank = max(len(layout.dims) for layout in layouts)
    dims = []
    for i in range(rank, 0, -1):
        dim: Dim = ()
        for layout in layouts:
            if i <= len(layout.dims):
                dim = matched(dim, layout.dims[-i])
        dims.append(dim)
    return once(DimLayout(tuple(dims)))


def once(layout: DimLayout) -> DimLayout:
    """``layout``, if it has experts at most once and rows at most once."""
    axes = layout.axes
    for axis in axes:
        if axes.count(axis) > 1:
            raise Mixed(axis)
    return layout


def matched(a: Dim, b: Dim) -> Dim:
    """The dimension of an elementwise operation on dimensions ``a`` and ``b``."""
    if a == b or not b:
        return a
    if not a:
        return b
    if len(a) == len(b) and all(_alike(f, g) for f, g in zip(a, b, strict=True)):
        return tuple(g if f.repeated else f for f, g in zip(a, b, strict=True))
    named = [f.axis for dim in (a, b) for f in dim if f.axis is not None]
    if not named:
        return _dim(max(math.prod(f.size for f in dim) for dim in (a, b)), None)
    raise Mixed(named[0])


def _alike(a: Factor, b: Factor) -> bool:
    return a == b or (a.size == b.size and (a.repeated or b.repeated))


def _dim(size: int, axis: Axis | None) -> Dim:
    """One factor; none for a plain dimension of size 1, which can be broadcast."""
    return () if size == 1 and axis is None else (Factor(size, axis),)


def _shared(factor: Factor, ways: int) -> int:
    if factor.axis is Axis.EXPERTS:
        return factor.size // ways
    return factor.size * ways if factor.axis is Axis.ROWS else factor.size


def _merged(factors: Iterable[Factor]) -> list[Factor]:
    """``factors`` with adjacent plain ones merged."""
    merged: list[Factor] = []
    for factor in factors:
        last = merged[-1] if merged else None
        if last and last.axis is factor.axis is None and last.repeated == factor.repeated:
            merged[-1] = Factor(last.size * factor.size, None, factor.repeated)
        else:
            merged.append(factor)
    return merged


def _take(factors: list[Factor], size: int) -> tuple[Dim, list[Factor]]:
    """The leading ``factors`` that make up a dimension of ``size``, and the rest."""
    taken: list[Factor] = []
    left = list(factors)
    if size == 1 and left and left[0].size == 1:
        return (left[0],), left[1:]
    while size > 1:
        first = left.pop(0)
        if size % first.size and first.axis is not None:
            raise Mixed(first.axis)
        part = math.gcd(size, first.size)
        if part < first.size:
            if first.axis is not None:
                raise Mixed(first.axis)
            left.insert(0, Factor(first.size // part, None, first.repeated))
            if part == 1:
                return _take_plain(taken, left, size)
        taken.append(Factor(part, first.axis, first.repeated))
        size //= part
    return tuple(taken), left


def _take_plain(taken: list[Factor], left: list[Factor], size: int) -> tuple[Dim, list[Factor]]:
    """The same where repeated and other factors must be split together."""
    count = 0
    whole = 1
    while whole % size:
        factor = left[count]
        if factor.axis is not None:
            raise Mixed(factor.axis)
        whole *= factor.size
        count += 1
    rest = [Factor(whole // size)] if whole > size else []
    return (*taken, Factor(size)), [*rest, *left[count:]]
