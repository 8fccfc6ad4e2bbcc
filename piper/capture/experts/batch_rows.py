"""Finds the rows of the batch in the values between chunks.

Devices that share the batch hold consecutive equal parts of a value's rows. Such a part is a slice
of the tensor only if rows are the outermost factor of one of its dimensions: ``[rows, seq, 64]``
may be flattened to ``[rows * seq, 64]``, but if it is transposed first, every slice has a part of
every row. Rows in expert slots are not in batch order either.

Rows in an order of their own can be sharded differently where each row is computed by itself. They
must then return to as many devices as put them in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.capture.chunk.chunks import Body, Chunk, Cut
from piper.capture.chunk.expert_regions import sorted_rows
from piper.capture.experts.part_rules import Mixed, PartRules, UnknownOperation, part_rules
from piper.capture.graphs import returned
from piper.capture.shard.placements import REPLICATED, Placements, TensorPlacement
from piper.ir.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """The dimension and the order of a value's rows."""

    dim: int | None = None
    """The dimension along which they can be sharded, if any."""
    order: int | None = None
    """The chunk that put them into an order of its own; None for the order of the batch."""


def rows_of(cut: Cut, rows: int, other: Cut | None = None) -> dict[int, Rows]:
    """The rows of every value between chunks; a tensor of the batch has ``rows``. ``other`` is the
    same model at another number of rows, if there is one."""
    made = {value for chunk in cut.chunks for value in chunk.outputs}
    placed: dict[int, _Followed] = {}
    known: dict[tuple[str, tuple[_Followed, ...]], tuple[_Followed, ...]] = {}
    rules = part_rules(rows)
    orders = _Orders(cut, {} if other is None else _varying(cut, other), rules)
    for chunk in cut.chunks:
        fakes = chunk.body.fakes()[chunk.body.parameters + chunk.body.buffers :]
        for value, fake in zip(chunk.inputs, fakes, strict=True):
            if value not in made:
                placed[value] = _Followed(_guess(fake, rows))
                orders.add(chunk, value, placed[value])
        given = tuple(placed[value] for value in chunk.inputs)
        key = (chunk.body.key, given)
        if key not in known:
            known[key] = _followed(chunk.body, given, rules, rows)
        placed |= zip(chunk.outputs, known[key], strict=True)
        for value in chunk.outputs:
            orders.add(chunk, value, placed[value])
    return orders.rows | _by_expert(cut)


@dataclass(frozen=True, slots=True)
class _Followed:
    """The placement of a value along an axis of rows."""

    placed: Placements
    lost: bool = False
    """Whether its rows passed an operation that mixes rows or has no rule, so that their dimension
    is a guess."""


def _varying(cut: Cut, other: Cut) -> dict[int, int]:
    """By value, the dimension whose size depends on the number of rows, where there is only one."""
    varying = {}
    for value, (mine, its) in enumerate(zip(cut.values, other.values, strict=True)):
        shapes = zip(mine.spec.shape, its.spec.shape, strict=False)
        dims = [dim for dim, (a, b) in enumerate(shapes) if a != b]
        if len(dims) == 1 and len(mine.spec.shape) == len(its.spec.shape):
            varying[value] = dims[0]
    return varying


def _by_expert(cut: Cut) -> dict[int, Rows]:
    """The rows of values that are sorted by expert."""
    by_value: dict[int, Rows] = {}
    for chunk in cut.chunks:
        rows = sorted_rows(chunk.body)
        if rows is not None:
            counts = chunk.inputs[rows.counts]
            values = (v for v in (*chunk.inputs, *chunk.outputs) if v != counts)
            by_value |= dict.fromkeys(values, Rows(0, chunk.index))
    return by_value


class _Orders:
    """Finds the order of the rows in each value."""

    def __init__(self, cut: Cut, varying: Mapping[int, int], rules: PartRules) -> None:
        self.rows: dict[int, Rows] = {}
        self._cut, self._varying, self._rules = cut, varying, rules
        self._known: dict[tuple[str, _Dims, _Dims], bool] = {}

    def add(self, maker: Chunk, value: int, followed: _Followed) -> None:
        """Find the rows of a value of ``maker``; the values that ``maker`` reads come first."""
        rows, dim = _rows(followed.placed), self._varying.get(value)
        counts = dim is not None and _counts(self._cut.values[value].spec)
        if followed.lost and (rows != Rows(0) or dim or counts):
            rows = None  # a guess holds only for the usual layout, rows first, and no indices
        self.rows[value] = rows or self._ordered(maker, dim)

    def _ordered(self, maker: Chunk, dim: int | None) -> Rows:
        orders = {self.rows[v].order for v in maker.inputs if v in self._varying}
        order = orders.pop() if len(orders) == 1 else None
        keeps = order is not None and self._keeps(maker)
        return Rows(dim, order if keeps else maker.index)

    def _keeps(self, chunk: Chunk) -> bool:
        """Whether ``chunk`` computes each row by itself, with rows along the varying dimensions."""
        reads, makes = (
            tuple(self._varying.get(v) for v in values) for values in (chunk.inputs, chunk.outputs)
        )
        key = (chunk.body.key, reads, makes)
        if key not in self._known:
            self._known[key] = _row_by_row(chunk.body, reads, makes, self._rules)
        return self._known[key]


_Dims = tuple[int | None, ...]


def _counts(spec: TensorSpec) -> bool:
    """Whether a value may hold positions of rows, which are valid only where the rows were
    counted."""
    return not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool)


def _row_by_row(body: Body, reads: _Dims, makes: _Dims, rules: PartRules) -> bool:
    """Whether a body treats each row by itself, with rows along the dimensions ``reads`` of its
    inputs and ``makes`` of its outputs."""
    given = tuple(_Followed(REPLICATED if dim is None else Shard(dim)) for dim in reads)
    try:
        made = _followed(body, given, rules, None)
    except (Mixed, UnknownOperation):
        return False
    return all(_rows(x.placed) == Rows(dim) for x, dim in zip(made, makes, strict=True))


def _followed(
    body: Body, given: Sequence[_Followed], rules: PartRules, rows: int | None
) -> tuple[_Followed, ...]:
    """The placements of a body's outputs, from those of its inputs. For an operation that mixes
    rows or has no rule, they are guessed from the number of ``rows``, if it is given."""
    graph = body.module.graph
    arguments = graph.find_nodes(op="placeholder")
    first = len(arguments) - len(given)
    placed: dict[fx.Node, Placements] = dict.fromkeys(arguments, REPLICATED)
    placed |= {node: x.placed for node, x in zip(arguments[first:], given, strict=True)}
    lost = {node for node, x in zip(arguments[first:], given, strict=True) if x.lost}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        try:
            placed[node] = rules.of(node, placed)
        except (Mixed, UnknownOperation) as why:
            if rows is None:
                raise
            placed[node] = _guesses(node.meta["val"], rows)
            outermost = all(_outermost(placed[arg]) for arg in node.all_input_nodes)
            if isinstance(why, Mixed) or not outermost:
                lost.add(node)
        if not lost.isdisjoint(node.all_input_nodes):
            lost.add(node)
    results = returned(graph)[: body.outputs]
    return tuple(_Followed(placed[node], node in lost) for node in results)


def _outermost(placed: Placements | None) -> bool:
    """Whether rows, if there are any, are along dimension 0, where a guess puts them."""
    if isinstance(placed, tuple):
        return all(map(_outermost, placed))
    return placed is None or _rows(placed) in (Rows(), Rows(0))


def _guess(value: Tensor, rows: int) -> TensorPlacement:
    """The placement of a tensor of the batch, or of the result of an operation without a rule."""
    return Shard(0) if value.shape and value.shape[0] == rows else REPLICATED


def _guesses(made: object, rows: int) -> Placements:
    """The same for one tensor, or for several."""
    if isinstance(made, list | tuple):
        return tuple(_guess(x, rows) if isinstance(x, Tensor) else None for x in made)
    return _guess(made, rows) if isinstance(made, Tensor) else REPLICATED


def _rows(placed: Placements) -> Rows | None:
    """The dimension of the rows; None if another factor is outside of them in that dimension."""
    if placed == REPLICATED:
        return Rows()
    return Rows(placed.dim) if isinstance(placed, Shard) else None
