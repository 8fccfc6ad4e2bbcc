"""Regions of experts: what is in them, and what is around them.

    tagged   [ sort ─▶ rows ─▶ grouped_mm ─▶ gate ─▶ grouped_mm ─▶ weigh, sort back ]
    after      sort ─▶ rows ─▶ [grouped_mm ─▶ gate ─▶ grouped_mm] ─▶ weigh, sort back

A region whose only parameters are those of grouped products is narrowed to these products and what
lies between them: it takes rows and offsets and makes rows. The sorting before and the combination
after become part of what is around it, so that expert parallelism moves rows and nothing else.

    tagged   [ [experts * rows] ─▶ [experts, rows] ─▶ bmm ─▶ gate ─▶ bmm ─▶ [experts * rows] ]
    after      [experts * rows] ─▶ [experts, rows] ─▶ [bmm ─▶ gate ─▶ bmm] ─▶ [experts * rows]

A region whose parameters have one weight for each expert loses the reshapes at its ends that give
its values a dimension of experts and take it away.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from piper.capture.chunk.chunks import Body
from piper.capture.graphs import ancestors, returned
from piper.capture.operators.grouped_mm import (
    EXPERT_COUNTS,
    EXPERT_OFFSETS,
    EXPERT_ROWS,
    GROUPED_MM,
)
from piper.capture.regions import Region, tags_of, with_tags
from piper.capture.trace.export import Exported
from piper.ir.shards import SortedRows

aten = torch.ops.aten


def narrow_expert_regions(exported: Exported) -> frozenset[Region]:
    """Narrow the regions of ``exported`` whose parameters are those of grouped products, or weights
    of experts; these regions."""
    grouped = _by_region(exported, {GROUPED_MM})
    found = {region for region, products in grouped.items() if _narrow(exported, region, products)}
    for region in _by_region(exported, _BATCHED):
        if region not in grouped and _release_reshapes(exported, region):
            found.add(region)
    return frozenset(found)


def _by_region(exported: Exported, targets: Collection[object]) -> dict[Region, list[fx.Node]]:
    """Calls of these operators by the innermost region that they are in."""
    found: dict[Region, list[fx.Node]] = {}
    for node in exported.graph.nodes:
        stack = tags_of(node.meta) if node.target in targets else ()
        if stack:
            found.setdefault(stack[-1], []).append(node)
    return found


def sorted_rows(body: Body) -> SortedRows | None:
    """What a chunk is, if it takes offsets and rows and makes rows."""
    graph = body.module.graph
    products = graph.find_nodes(op="call_function", target=GROUPED_MM)
    offsets = {node.args[2] for node in products}
    if len(offsets) != 1:
        return None
    (ends,) = offsets
    if ends.target is not EXPERT_OFFSETS:
        return None
    found = ends.args[0]
    inputs = graph.find_nodes(op="placeholder")[body.parameters + body.buffers :]
    if found not in inputs or body.updates or len(inputs) < 2:
        return None
    rows = {node.meta["val"].shape[:1] for node in (*inputs, *returned(graph)) if node != found}
    if rows != {(products[0].meta["val"].shape[0],)}:
        return None
    ((count,),) = rows
    return SortedRows(inputs.index(found), found.meta["val"].shape[0], count)


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
        return False  # something else has parameters too
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
    """Let reshapes at the ends of a region out of it that give values a dimension of experts, and
    that take it away; whether there are any."""
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
    """Of what is ``inside`` a region, keep the ``core`` in it."""
    span = _span(graph, inside)
    after = _descendants(core, set(span)) - core
    _reorder(span, core, after)
    for node in inside:
        if node not in core:
            stack = tuple(one for one in tags_of(node.meta) if one != region)
            node.meta = with_tags(node.meta, stack)


def _count(graph: fx.Graph, ends: fx.Node, products: list[fx.Node]) -> fx.Node:
    """Let the products have their offsets from the counts of rows, which is what can be told of
    the rows of several devices."""
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
    """What depends on parameters and nothing else: transposed, or cast."""
    found: dict[fx.Node, None] = {}
    for node in inside:
        args = node.all_input_nodes
        if args and all(arg in exported.parameters or arg in found for arg in args):
            found[node] = None
    return list(found)


def _gathers(node: fx.Node, weights: list[fx.Node], ends: fx.Node, products: list[fx.Node]) -> bool:
    """Whether it takes what a parameter has for each row's expert: a bias. The experts of rows
    are those that the offsets were counted from."""
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
    """Whether these are the experts of sorted rows, and not those of rows as they come."""
    node = _origin(node)
    if node.target is operator.getitem and node.args[1] == 0:
        return _origin(node.args[0]).target in _SORTS
    if node.target is not aten.index.Tensor:
        return False
    of, *order = node.all_input_nodes
    return len(order) == 1 and _sorted_by(_origin(order[0])) is _origin(of)


def _sorted_by(order: fx.Node) -> fx.Node | None:
    """What is in order when it is taken in this one."""
    if order.target is operator.getitem and order.args[1] == 1:
        order = _origin(order.args[0])
        return _origin(order.args[0]) if order.target in _SORTS else None
    return _origin(order.args[0]) if order.target in _ARGSORTS else None


def _origin(node: Any) -> fx.Node:
    """What has the same elements in the same order, further up."""
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
    """Find the expert of a row by the offsets, which are all that is known of it elsewhere."""
    rows = products[0].meta["val"].shape[0]
    for node in gathered:
        node.target = EXPERT_ROWS
        node.args = (node.args[0], ends, rows)


def _descendants(of: Iterable[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(of)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(user for user in node.users if user in among)
    return found


def _span(graph: fx.Graph, inside: list[fx.Node]) -> list[fx.Node]:
    """All ops from the first of the region to its last."""
    nodes = list(graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    return nodes[order[inside[0]] : order[inside[-1]] + 1]


def _reorder(span: list[fx.Node], core: set[fx.Node], after: set[fx.Node]) -> None:
    """What is before the core, the core, and what needs it."""
    place = span[0].prev
    before = [node for node in span if node not in core and node not in after]
    middle = [node for node in span if node in core]
    for node in (*before, *middle, *(node for node in span if node in after)):
        place.append(node)
        place = node
