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
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from piper.capture.intercept.bincount import BINCOUNT
from piper.capture.operators.grouped_mm import EXPERT_COUNTS
from piper.capture.shard.placements import REPLICATED, Routed, RowRole, ShardedSections
from piper.capture.shard.rewrites.table import Form, Share

aten = torch.ops.aten


class UnroutedError(Exception):
    """Rows sorted by each device are needed in the order of the whole."""


Now = Mapping[fx.Node, Any]
Ask = Callable[[fx.Node, dict[fx.Node, Any]], Any]


def routed(node: fx.Node, made: Now, ask: Ask) -> Form | None:
    """The form of an operation that sorts rows or reads sorted rows. ``ask`` gives the placement of
    a result by the other rules."""
    now = {x: made[x] for x in node.all_input_nodes}
    if node.target in SORTS and isinstance(now[_arg(node)], Shard | ShardedSections):
        return _sorted(node, now)
    if _counts(node) and isinstance(now[_arg(node)], Shard | ShardedSections):
        order = _sorts_of(_arg(node))
        return None if order is None else Form(now, Routed(order, RowRole.COUNTS))
    if not any(isinstance(p, Routed) for p in now.values()):
        return None
    for rule in (_indexed, _returned, _inverted, _arithmetic, _counted):
        form = rule(node, now)
        if form is not None:
            return form
    return _each_row(node, now, ask)


def _arg(node: fx.Node) -> fx.Node:
    x = node.args[0]
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
    same = (x for x in keys.graph.nodes if x.target in SORTS and _origin(_arg(x)) is _origin(keys))
    return _origin(keys).name if any(same) else None


def _sorted(node: fx.Node, now: Now) -> Form | None:
    keys = _arg(node)
    value = keys.meta["val"]
    if value.dim() != 1 or value.is_floating_point():
        return None
    order = _origin(keys).name
    positions = Routed(order, RowRole.POSITIONS, _size(keys), now[keys])
    whole = node.target not in _ARGSORTS
    return Form(now, (Routed(order, RowRole.KEYS), positions) if whole else positions)


def _indexed(node: fx.Node, now: Now) -> Form | None:
    """Rows that are picked by their positions."""
    args: Any = node.args
    if node.target is aten.index.Tensor and len(args[1]) == 1:
        at = args[1][0]
    elif node.target is aten.index_select.default and args[1] == 0:
        at = args[2]
    else:
        return None
    x, places = _arg(node), now.get(at)
    if not isinstance(places, Routed):
        return None
    if places.role is RowRole.POSITIONS and _reads(x, now[x], places):
        keys = _origin(x).name == places.order
        made = Routed(places.order, RowRole.KEYS if keys else RowRole.ROWS)
        return Form({x: places.natural, at: places}, made)
    if places.role is RowRole.INVERSE and now[x] in (places.like_rows, places.like_keys):
        return Form(now, places.natural)
    return None


def _reads(x: fx.Node, now: Any, places: Routed) -> bool:
    """Whether ``x`` is what positions index and has its placement, or every device can take its
    part."""
    if _size(x) != places.rows:
        return False
    if now != REPLICATED or isinstance(places.natural, Shard):
        return bool(now in (places.natural, REPLICATED))
    return not x.meta["val"].is_floating_point() or not x.all_input_nodes


def _written(node: fx.Node) -> tuple[Any, Any, bool]:
    """The positions to which an operation writes rows, the rows, and whether it adds them."""
    args: Any = node.args
    if node.target is aten.index_put.default and len(args[1]) == 1:
        return args[1][0], args[2], args[3:] == (True,)
    if node.target in (aten.index_add.default, aten.scatter.src) and args[1] == 0:
        return args[2], args[3], node.target is aten.index_add.default
    return None, None, False


def _returned(node: fx.Node, now: Now) -> Form | None:
    """Rows that are added to their tokens."""
    at, source, adds = _written(node)
    places = now.get(at)
    if not adds or not isinstance(places, Routed) or places.role is not RowRole.POSITIONS:
        return None
    x = _arg(node)
    if now[source] != places.like_rows or not _reads(x, now[x], places):
        return None
    return Form({x: places.natural, at: places, source: now[source]}, places.natural)


def _inverted(node: fx.Node, now: Now) -> Form | None:
    """The inverse of a permutation."""
    at, numbers, adds = _written(node)
    writes = isinstance(numbers, fx.Node) and numbers.target is aten.arange.default
    if node.target in _ARGSORTS:
        at = _arg(node)
    elif adds or not writes:
        return None
    places = now.get(at)
    if not isinstance(places, Routed) or (writes and numbers.args != (_size(at),)):
        return None
    if places.role is not RowRole.POSITIONS or places.rows != _size(at):
        return None

    def emit(share: Share) -> fx.Node:
        order = share.read(at)
        fake = order.meta["val"]
        numbered = share.call(aten.arange.default, fake.shape[0], device=fake.device)
        base = share.call(aten.empty_like.default, order)
        return share.call(aten.scatter.src, base, 0, order, numbered)

    return Form({at: places}, replace(places, role=RowRole.INVERSE), emit if writes else None)


def _arithmetic(node: fx.Node, now: Now) -> Form | None:
    """Positions of tokens, from those of the rows of each of their experts: ``rows // experts`` if
    a token's rows are adjacent, ``rows % tokens`` if they are one after another."""
    divides = node.target is aten.floor_divide.default
    if not divides and node.target is not aten.remainder.Scalar:
        return None
    at, by = node.args
    places = now.get(at)  # type: ignore[arg-type]
    if not isinstance(places, Routed) or places.role is not RowRole.POSITIONS:
        return None
    if type(by) is not int or by < 1 or places.rows % by:
        return None
    rows = places.rows // by if divides else by
    natural = _of_tokens(places, rows, divides=divides)
    if natural is None:
        return None

    def emit(share: Share) -> fx.Node:
        local = share.read(at)  # type: ignore[arg-type]
        size = _size(local) * rows // _size(at)  # type: ignore[arg-type]
        return share.call(aten.remainder.Scalar, local, size)

    made = replace(places, rows=rows, natural=natural)
    return Form(now, made, None if divides else emit)


def _of_tokens(places: Routed, rows: int, *, divides: bool) -> Shard | ShardedSections | None:
    """The placement of ``rows`` tokens, from that of the rows of their experts."""
    natural, each = places.natural, places.rows // rows
    if not isinstance(natural, ShardedSections):
        return natural if divides or each == 1 else None
    sections = natural.sections
    if divides:
        whole = not any(n % each for n in sections)
        return ShardedSections(0, tuple(n // each for n in sections)) if whole else None
    count, rest = divmod(len(sections), each)
    if rest or sections != sections[:count] * each:
        return None
    return ShardedSections(0, sections[:count]) if count > 1 else Shard(0)


def _counted(node: fx.Node, now: Now) -> Form | None:
    """How often each key occurs, and sums of that over keys."""
    places = now[_arg(node)] if isinstance(node.args[0], fx.Node) else None
    if not isinstance(places, Routed):
        return None
    made = Routed(places.order, RowRole.COUNTS)
    if places.role is RowRole.COUNTS and node.target in _LINEAR:
        return Form(now, made)
    equal = places.role is RowRole.KEYS and _origin(_arg(node)).target is aten.eq.Tensor
    sums = node.target is aten.sum.dim_IntList and node.args[1:] == ([0],)
    if (equal and sums) or (places.role is RowRole.KEYS and _counts(node)):
        return Form(now, made)
    return None


def _counts(node: fx.Node) -> bool:
    """Whether ``node`` counts how often each number occurs, in a fixed range."""
    if node.target is aten.histc.default:
        return len(node.args) == 4 and node.args[2] != node.args[3]
    return node.target is BINCOUNT


def _each_row(node: fx.Node, now: Now, ask: Ask) -> Form:
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
        return Form(now, own)
    return Form(now, tuple(p and own for p in made))


_ARGSORTS = frozenset({aten.argsort.default, aten.argsort.stable})
SORTS = _ARGSORTS | {aten.sort.default, aten.sort.stable}
_CASTS = frozenset({aten._to_copy.default, aten.to.dtype, aten.alias.default, aten.detach.default})
_LIKE = frozenset({aten.empty_like.default, aten.zeros_like.default})
_LINEAR = _CASTS | {aten.cumsum.default, EXPERT_COUNTS}
"""Operations that are linear in counts, along the experts."""
