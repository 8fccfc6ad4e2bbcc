"""Narrows expert regions: sorting, combining and reshapes at their ends move out of them.

    tagged   [ sort ─▶ rows ─▶ grouped_mm ─▶ gate ─▶ grouped_mm ─▶ weigh, sort back ]
    after      sort ─▶ rows ─▶ [grouped_mm ─▶ gate ─▶ grouped_mm] ─▶ weigh, sort back

A region whose only parameters are those of grouped products is narrowed to these products and the
ops between them: it takes rows and row counts and makes rows. The sorting before and the
combination after move out of the region, so that expert parallelism moves only rows.

    tagged   [ [experts * rows] ─▶ [experts, rows] ─▶ bmm ─▶ gate ─▶ bmm ─▶ [experts * rows] ]
    after      [experts * rows] ─▶ [experts, rows] ─▶ [bmm ─▶ gate ─▶ bmm] ─▶ [experts * rows]

A region whose parameters have one weight for each expert loses the reshapes at its ends that add
and remove the expert dimension.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from piper.capture.chunk.chunks import Body
from piper.capture.graphs import ancestors, computed_from, returned
from piper.capture.operators.grouped_mm import (
    EXPERT_COUNTS,
    EXPERT_OFFSETS,
    EXPERT_ROWS,
    GROUPED_MM,
)
from piper.capture.regions import Region, tags_of, with_tags
from piper.capture.trace.exported import Exported
from piper.ir.grouped import grouped
from piper.ir.shards import SortedRows

aten = torch.ops.aten


def narrow_expert_regions(exported: Exported) -> frozenset[Region]:
    """Narrow the regions of ``exported`` whose parameters belong to grouped products or are stacked
    by expert; return these regions."""
    grouped = _by_region(exported, {GROUPED_MM})
    narrowed = {
        region for region, products in grouped.items() if _narrow(exported, region, products)
    }
    for region in _by_region(exported, _BATCHED):
        if region not in grouped and _release_reshapes(exported, region):
            narrowed.add(region)
    return frozenset(narrowed)


def _by_region(exported: Exported, targets: Collection[object]) -> dict[Region, list[fx.Node]]:
    """Calls of these operators by their innermost region."""
    calls = [node for node in exported.graph.nodes if node.target in targets]
    return grouped((stack[-1], node) for node in calls if (stack := tags_of(node.meta)))


def sorted_rows(body: Body) -> SortedRows | None:
    """``SortedRows`` of a chunk that takes row counts and rows and makes rows; else None."""
    graph = body.module.graph
    products = graph.find_nodes(op="call_function", target=GROUPED_MM)
    offsets = {node.args[2] for node in products}
    if len(offsets) != 1:
        return None
    (ends,) = offsets
    if ends.target is not EXPERT_OFFSETS:
        return None
    counts = ends.args[0]
    inputs = graph.find_nodes(op="placeholder")[body.parameters + body.buffers :]
    if counts not in inputs or body.updates or len(inputs) < 2:
        return None
    rows = {node.meta["val"].shape[:1] for node in (*inputs, *returned(graph)) if node != counts}
    if rows != {(products[0].meta["val"].shape[0],)}:
        return None
    ((count,),) = rows
    return SortedRows(inputs.index(counts), counts.meta["val"].shape[0], count)


def _narrow(exported: Exported, region: Region, products: list[fx.Node]) -> bool:
    graph = exported.graph
    inside = [node for node in graph.nodes if region in tags_of(node.meta)]
    members = set(inside)
    weights = _weights(exported, inside)
    used = {arg for node in inside for arg in node.all_input_nodes if arg in exported.parameters}
    (ends, *others) = {node.all_input_nodes[-1] for node in products}
    if others:
        return False
    gathered = [node for node in inside if _gathers(node, weights, ends, products)]
    held = set(weights).union(used)
    if any(
        user not in held and user not in products and user not in gathered
        for weight in held
        for user in weight.users
        if user in members
    ):
        return False  # another op reads parameters too
    ends = _count(graph, ends, products)
    _use_offsets(gathered, ends, products)
    inside = [node for node in graph.nodes if region in tags_of(node.meta)]
    gathered = [node for node in inside if node.target is EXPERT_ROWS]
    last = {*products, *(user for node in gathered for user in node.users)}
    first = _descendants([*products, *gathered], set(inside))
    core = first.intersection(ancestors(last, ())) | {*weights, ends}
    _keep(graph, region, inside, core)
    return True


def _release_reshapes(exported: Exported, region: Region) -> bool:
    """Move reshapes that add or remove the expert dimension at a region's ends out of it; return
    whether there were any."""
    inside = [node for node in exported.graph.nodes if region in tags_of(node.meta)]
    members = set(inside)
    used = {arg for node in inside for arg in node.all_input_nodes if arg in exported.parameters}
    shapes = [parameter.meta["val"].shape for parameter in used]
    leading = {shape[:1] for shape in shapes if len(shape) > 1}
    if len(leading) != 1 or not all(len(shape) > 1 for shape in shapes):
        return False
    (experts,) = leading

    def at_an_end(node: fx.Node) -> bool:
        if node.target not in _RESHAPES:
            return False
        (of,) = node.all_input_nodes
        before, after = of.meta["val"].shape[:1], node.meta["val"].shape[:1]
        if of not in members and of not in exported.parameters:
            return bool(after == experts != before)
        return bool(before == experts != after) and members.isdisjoint(node.users)

    ends = {node for node in inside if at_an_end(node)}
    if ends:
        _keep(exported.graph, region, inside, members - ends)
    return bool(ends)


def _keep(graph: fx.Graph, region: Region, inside: list[fx.Node], core: set[fx.Node]) -> None:
    """Keep only the ``core`` of the ops ``inside`` a region in it."""
    span = _span(graph, inside)
    after = _descendants(core, set(span)) - core
    _reorder(span, core, after)
    for node in inside:
        if node not in core:
            stack = tuple(tag for tag in tags_of(node.meta) if tag != region)
            node.meta = with_tags(node.meta, stack)


def _count(graph: fx.Graph, ends: fx.Node, products: list[fx.Node]) -> fx.Node:
    """Make the products read offsets computed from row counts, since only counts can describe rows
    of several devices; return these offsets."""
    with graph.inserting_after(ends):
        counts = graph.call_function(EXPERT_COUNTS, (ends,))
    with graph.inserting_after(counts):
        offsets = graph.call_function(EXPERT_OFFSETS, (counts,))
    for node, value in ((counts, ends.meta["val"].unsqueeze(1)), (offsets, ends.meta["val"])):
        node.meta = {**products[0].meta, "val": value}
    for product in products:
        product.replace_input_with(ends, offsets)
    return offsets


def _weights(exported: Exported, inside: Iterable[fx.Node]) -> list[fx.Node]:
    """Ops that depend on parameters alone, such as transposes and casts."""
    return list(computed_from((x for x in inside if x.all_input_nodes), exported.parameters))


def _gathers(node: fx.Node, weights: list[fx.Node], ends: fx.Node, products: list[fx.Node]) -> bool:
    """Whether ``node`` indexes a parameter, such as a bias, by each row's expert. These must be the
    experts that the offsets were counted from."""
    if node.target is not aten.index.Tensor:
        return False
    of, *experts = node.all_input_nodes
    if (of not in weights and of.op != "placeholder") or len(experts) != 1:
        return False
    rows = products[0].meta["val"].shape[0]
    return (
        node.args[1] == [experts[0]]
        and experts[0].meta["val"].shape == (rows,)
        and of.meta["val"].shape[0] == ends.meta["val"].shape[0]
        and experts[0] in ancestors([ends], ())
        and _is_sorted(experts[0])
    )


def _is_sorted(node: fx.Node) -> bool:
    """Whether ``node`` holds the experts of sorted rows, not of rows in their original order."""
    node = _origin(node)
    if node.target is operator.getitem and node.args[1] == 0:
        return _origin(node.args[0]).target in _SORTS
    if node.target is not aten.index.Tensor:
        return False
    of, *order = node.all_input_nodes
    return len(order) == 1 and _sorted_by(_origin(order[0])) is _origin(of)


def _sorted_by(order: fx.Node) -> fx.Node | None:
    """The value that ``order`` sorts when it is used as an index."""
    if order.target is operator.getitem and order.args[1] == 1:
        order = _origin(order.args[0])
        return _origin(order.args[0]) if order.target in _SORTS else None
    return _origin(order.args[0]) if order.target in _ARGSORTS else None


def _origin(node: Any) -> fx.Node:
    """The earliest ancestor with the same elements in the same order."""
    assert isinstance(node, fx.Node)
    while node.target in _SAME and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


_RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
_BATCHED = frozenset({aten.bmm.default, aten.matmul.default, aten.einsum.default})
_SORTS = frozenset({aten.sort.default, aten.sort.stable})
_ARGSORTS = frozenset({aten.argsort.default, aten.argsort.stable})
_SAME = frozenset(
    {
        aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default,
        aten.to.dtype, aten._to_copy.default, aten.view.default, aten.reshape.default,
        aten.clamp.default,
    }
)  # fmt: skip


def _use_offsets(gathered: list[fx.Node], ends: fx.Node, products: list[fx.Node]) -> None:
    """Find each row's expert by the offsets: other devices know nothing else about it."""
    rows = products[0].meta["val"].shape[0]
    for node in gathered:
        node.target = EXPERT_ROWS
        node.args = (node.args[0], ends, rows)


def _descendants(of: Iterable[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    pending = list(of)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(user for user in node.users if user in among)
    return seen


def _span(graph: fx.Graph, inside: list[fx.Node]) -> list[fx.Node]:
    """All ops from the first to the last one ``inside`` a region."""
    nodes = list(graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    return nodes[order[inside[0]] : order[inside[-1]] + 1]


def _reorder(span: list[fx.Node], core: set[fx.Node], after: set[fx.Node]) -> None:
    """Order the span: ops before the core, the core, then the ops that need it."""
    place = span[0].prev
    before = [node for node in span if node not in core and node not in after]
    middle = [node for node in span if node in core]
    for node in (*before, *middle, *(node for node in span if node in after)):
        place.append(node)
        place = node
