"""Routing along a sharded sequence: each device sorts the rows of its own tokens by expert, and
nothing is gathered for it.

    experts S(0) ─▶ sort ─▶ rows in an order of their own ─▶ experts ─▶ sorted back ─▶ S(0)

The experts compute each row by itself, so that it may come from any device; the inverse permutation
restores the layout from before the sort. A value in such an order can only be computed row by row,
counted, or sorted back. If something else reads it, ``UnroutedError`` says so, and the rows are
gathered before the sort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from piper.capture.intercept.bincount import BINCOUNT
from piper.capture.operators.grouped_mm import EXPERT_COUNTS
from piper.capture.shard.placements import REPLICATED
from piper.capture.shard.rewrites.fused_weights import ShardedSections

aten = torch.ops.aten


class UnroutedError(Exception):
    """Rows sorted by each device are needed in the order of the whole."""


class RowRole(Enum):
    """What a value of sorted rows is."""

    ROWS = "rows"
    KEYS = "keys"
    """Rows that depend on the sorted keys alone."""
    POSITIONS = "positions"
    """The position before the sort of each row."""
    INVERSE = "inverse"
    """The position after the sort of each row from before."""
    COUNTS = "counts"
    """The sum over a device's rows of how often each key occurs."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows in the order in which each device sorted its own, along dimension 0."""

    order: object
    """Which keys they are sorted by."""
    role: RowRole
    rows: int = 0
    """Rows of the whole before the sort; the whole of what positions index."""
    natural: Shard | ShardedSections | None = None
    """The placement before the sort; that of what positions index."""

    @property
    def dim(self) -> int:
        return 0

    @property
    def like_rows(self) -> Routed:
        return Routed(self.order, RowRole.ROWS)

    @property
    def like_keys(self) -> Routed:
        return Routed(self.order, RowRole.KEYS)

    def __str__(self) -> str:
        return f"{self.role.value} by expert"


Now = Mapping[fx.Node, Any]
Ask = Callable[[fx.Node, dict[fx.Node, Any]], Any]


def routed(node: fx.Node, made: Now, ask: Ask) -> tuple[dict[fx.Node, Any], Any] | None:
    """The placements in which an operation reads its inputs, and that of its result, if it sorts
    rows or reads sorted rows. ``ask`` gives the result's placement by the other rules."""
    sorts = node.target in _SORTS or node.target in _ARGSORTS
    if sorts and isinstance(before := made[_arg(node)], Shard | ShardedSections):
        return _sorted(node, _arg(node), before)
    now = {x: made[x] for x in node.all_input_nodes}
    if _counts(node) and isinstance(now[_arg(node)], Shard | ShardedSections):
        order = _sorts_of(_arg(node))
        return None if order is None else (now, Routed(order, RowRole.COUNTS))
    if not any(isinstance(p, Routed) for p in now.values()):
        return None
    for rule in (_indexed, _returned, _inverted, _arithmetic, _counted):
        found = rule(node, now)
        if found is not None:
            return found
    return _each_row(node, now, ask)


def local_call(node: fx.Node, made: Any, args: Any, call: Callable[..., fx.Node]) -> Any:
    """The operation and arguments of ``node`` on a device's rows, where they differ."""
    if not isinstance(made, Routed):
        return None
    if made.role is RowRole.INVERSE and node.target in (_INDEX_PUT, _SCATTER):
        order = args[1][0] if node.target is _INDEX_PUT else args[2]
        fake = order.meta["val"]
        places = call(aten.arange.default, fake.shape[0], device=fake.device)
        base = call(aten.empty_like.default, order)
        return aten.scatter.src, (base, 0, order, places)
    if made.role is RowRole.POSITIONS and node.target is aten.remainder.Scalar:
        whole = node.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
        return node.target, (args[0], args[0].meta["val"].shape[0] * args[1] // whole)
    return None


def _arg(node: fx.Node, place: int = 0) -> fx.Node:
    x = node.args[place]
    assert isinstance(x, fx.Node)
    return x


def _size(x: fx.Node) -> int:
    return int(x.meta["val"].shape[0])


def _origin(node: fx.Node) -> fx.Node:
    while node.target in _CASTS:
        node = _arg(node)
    return node


def _sorts_of(keys: fx.Node) -> str | None:
    """The order by ``keys``, if they are sorted anywhere."""
    sorts = _SORTS | _ARGSORTS
    graph = keys.graph
    same = (x for x in graph.nodes if x.target in sorts and _origin(_arg(x)) is _origin(keys))
    return _origin(keys).name if any(same) else None


def _sorted(
    node: fx.Node, keys: fx.Node, before: Shard | ShardedSections
) -> tuple[dict[fx.Node, Any], Any] | None:
    value = keys.meta["val"]
    if value.dim() != 1 or value.is_floating_point():
        return None
    order = _origin(keys).name
    positions = Routed(order, RowRole.POSITIONS, _size(keys), before)
    if node.target in _ARGSORTS:
        return {keys: before}, positions
    return {keys: before}, (Routed(order, RowRole.KEYS), positions)


def _index(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The rows and the positions of an operation that picks rows."""
    if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        at = node.args[1][0]  # type: ignore[index]
    elif node.target is aten.index_select.default and node.args[1] == 0:
        at = node.args[2]
    else:
        return None
    return (_arg(node), at) if isinstance(at, fx.Node) else None


def _indexed(node: fx.Node, now: Now) -> tuple[dict[fx.Node, Any], Any] | None:
    """Rows that are picked by their positions."""
    if (index := _index(node)) is None:
        return None
    x, at = index
    places = now[at]
    if not isinstance(places, Routed):
        return None
    if places.role is RowRole.POSITIONS and _size(x) == places.rows:
        keys = _origin(x).name == places.order
        if _reads(x, now[x], places):
            made = Routed(places.order, RowRole.KEYS if keys else RowRole.ROWS)
            return {x: places.natural, at: places}, made
    if places.role is RowRole.INVERSE and now[x] in (places.like_rows, places.like_keys):
        return {x: now[x], at: places}, places.natural
    return None


def _reads(x: fx.Node, now: Any, places: Routed) -> bool:
    """Whether ``x`` has the placement that positions index, or every device can take its part."""
    if now != REPLICATED or isinstance(places.natural, Shard):
        return bool(now in (places.natural, REPLICATED))
    return not x.meta["val"].is_floating_point() or not x.all_input_nodes


def _puts(node: fx.Node) -> bool:
    """Whether ``node`` puts rows where a single index says."""
    return node.target is _INDEX_PUT and len(node.args[1]) == 1  # type: ignore[arg-type]


def _put(node: fx.Node) -> fx.Node:
    indices = node.args[1]
    assert isinstance(indices, list | tuple)
    at = indices[0]
    assert isinstance(at, fx.Node)
    return at


def _returned(node: fx.Node, now: Now) -> tuple[dict[fx.Node, Any], Any] | None:
    """Rows that are added to their tokens."""
    if node.target is aten.index_add.default and node.args[1] == 0:
        at, source = _arg(node, 2), _arg(node, 3)
    elif _puts(node) and node.args[3:] == (True,):
        at, source = _put(node), _arg(node, 2)
    else:
        return None
    x, places = _arg(node), now[at]
    if not isinstance(places, Routed) or places.role is not RowRole.POSITIONS:
        return None
    if _size(x) != places.rows or now[source] != places.like_rows:
        return None
    if not _reads(x, now[x], places):
        return None
    return {x: places.natural, at: places, source: now[source]}, places.natural


def _inverted(node: fx.Node, now: Now) -> tuple[dict[fx.Node, Any], Any] | None:
    """The inverse of a permutation."""
    if node.target in _ARGSORTS:
        at = _arg(node)
    elif _puts(node) and node.args[3:] in ((), (False,)):
        at = _put(node)
        if not _counts_up(node.args[2], at):
            return None
    elif node.target is _SCATTER and node.args[1] == 0:
        at = _arg(node, 2)
        if not _counts_up(node.args[3], at):
            return None
    else:
        return None
    places = now[at]
    if not isinstance(places, Routed) or places.role is not RowRole.POSITIONS:
        return None
    if places.rows != _size(at):
        return None
    return {at: places}, replace(places, role=RowRole.INVERSE)


def _counts_up(source: Any, at: fx.Node) -> bool:
    """Whether ``source`` holds 0, 1, 2 and so on, one for each of ``at``."""
    plain = isinstance(source, fx.Node) and source.target is aten.arange.default
    return plain and source.args == (_size(at),)


def _arithmetic(node: fx.Node, now: Now) -> tuple[dict[fx.Node, Any], Any] | None:
    """Positions of tokens, from those of the rows of each of their experts: ``rows // experts`` if
    a token's rows are adjacent, ``rows % tokens`` if they are one after another."""
    if node.target not in (aten.floor_divide.default, aten.remainder.Scalar):
        return None
    places, by = now[_arg(node)], node.args[1]
    if not isinstance(places, Routed) or places.role is not RowRole.POSITIONS:
        return None
    if type(by) is not int or by < 1 or places.rows % by:
        return None
    divides = node.target is aten.floor_divide.default
    rows = places.rows // by if divides else by
    natural = places.natural
    if isinstance(natural, ShardedSections):
        sections = natural.sections
        if divides:
            if any(n % by for n in sections):
                return None
            natural = ShardedSections(0, tuple(n // by for n in sections))
        else:
            count, rest = divmod(len(sections) * rows, places.rows)
            if rest or sections != sections[:count] * (places.rows // rows):
                return None
            natural = ShardedSections(0, sections[:count]) if count > 1 else Shard(0)
    elif not divides and rows != places.rows:
        return None
    return {_arg(node): places}, replace(places, rows=rows, natural=natural)


def _counted(node: fx.Node, now: Now) -> tuple[dict[fx.Node, Any], Any] | None:
    """How often each key occurs, and sums of that over keys."""
    places = now[_arg(node)] if isinstance(node.args[0], fx.Node) else None
    if not isinstance(places, Routed):
        return None
    made = Routed(places.order, RowRole.COUNTS)
    if places.role is RowRole.COUNTS and node.target in _LINEAR:
        return {_arg(node): places}, made
    equal = places.role is RowRole.KEYS and _origin(_arg(node)).target is aten.eq.Tensor
    sums = node.target is aten.sum.dim_IntList and node.args[1:] == ([0],)
    if (equal and sums) or (places.role is RowRole.KEYS and _counts(node)):
        return {_arg(node): places}, made
    return None


def _counts(node: fx.Node) -> bool:
    """Whether ``node`` counts how often each number occurs, in a fixed range."""
    if node.target is aten.histc.default:
        return len(node.args) == 4 and node.args[2] != node.args[3]
    return node.target is BINCOUNT


def _each_row(node: fx.Node, now: Now, ask: Ask) -> tuple[dict[fx.Node, Any], Any]:
    """An operation on each row by itself."""
    read = {p for p in now.values() if isinstance(p, Routed)}
    roles, orders = {p.role for p in read}, {p.order for p in read}
    others = {x: p for x, p in now.items() if not isinstance(p, Routed)}
    places = roles <= {RowRole.POSITIONS, RowRole.INVERSE} and node.target in _LIKE
    if len(orders) > 1 or not (roles <= {RowRole.ROWS, RowRole.KEYS} or places):
        raise UnroutedError
    if any(p != REPLICATED for p in others.values()):
        raise UnroutedError
    needs = {x: Shard(0) if isinstance(p, Routed) else p for x, p in now.items()}
    made = ask(node, needs)
    results = made if isinstance(made, tuple) else (made,)
    if any(p is not None and p != Shard(0) for p in results) or made is None:
        raise UnroutedError
    keys = roles == {RowRole.KEYS} and all(x.op == "call_function" for x in others)
    role = RowRole.KEYS if keys and not any(x.all_input_nodes for x in others) else RowRole.ROWS
    own = Routed(orders.pop(), role)
    if not isinstance(made, tuple):
        return dict(now), own
    return dict(now), tuple(p and own for p in made)


_SORTS = frozenset({aten.sort.default, aten.sort.stable})
_ARGSORTS = frozenset({aten.argsort.default, aten.argsort.stable})
_INDEX_PUT, _SCATTER = aten.index_put.default, aten.scatter.src
_CASTS = frozenset({aten._to_copy.default, aten.to.dtype, aten.alias.default, aten.detach.default})
_LIKE = frozenset({aten.empty_like.default, aten.zeros_like.default})
_LINEAR = _CASTS | {aten.cumsum.default, EXPERT_COUNTS}
"""Operations that are linear in counts, along the experts."""
