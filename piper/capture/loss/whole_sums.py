"""Losses that are plain sums over rows become sums over the whole batch.

The losses of the parts of a batch (microbatches, replicas) are averaged. That is exact for means. A
sum over the rows of one of P parts is multiplied by P here, so that the average is the sum over the
whole batch:

    loss = 0.5 * (x - y).square().sum() + penalty    becomes    0.5 * (P * sum) + penalty

Only sums that enter the loss linearly, and for certain, are rewritten. A sum that is divided by a
multiple of the number of rows is a mean.
"""

from __future__ import annotations

import torch
from torch import fx

from piper.capture.graphs import ancestors
from piper.capture.loss import reductions as op
from piper.capture.loss.row_mixing import RowKind
from piper.capture.loss.whole_means import WholeMeans

aten = torch.ops.aten
_Use = tuple[fx.Node, fx.Node]
"""A reader, and the sum that it reads."""


def take_whole_sums(
    graph: fx.Graph, loss: fx.Node, means: WholeMeans, parts: int, size: int
) -> None:
    """Multiply by ``parts`` each sum over rows that ``loss`` is linear in. ``graph`` is a step on
    one of ``parts`` equal parts of a batch, of ``size`` rows; ``means`` has rewritten its means."""
    for reader, summed in _uses(graph.output_node(), loss, means, size) or ():
        with graph.inserting_after(summed):
            whole = graph.call_function(aten.mul.Tensor, (summed, float(parts)))
        whole.meta = dict(summed.meta)
        reader.replace_input_with(summed, whole)


def _uses(reader: fx.Node, node: fx.Node, means: WholeMeans, size: int) -> list[_Use] | None:
    """The sums over rows that ``node`` is linear in, with their readers; None if unknown."""
    state = means.walk.states[node]
    if state.kind is RowKind.FIXED or state.summed is False:
        return []
    if state.summed:
        powers = {means.counted[x] for x in ancestors([node], ()) if x in means.counted}
        if not powers:
            return [(reader, node)]
        return [] if powers == {1} and means.all_counted(node) else None
    if state.kind is not RowKind.REDUCED:
        return None
    first, second = (*node.args, None, None)[:2]
    if op.packet_of(node) in op.CASTS and isinstance(first, fx.Node):
        return _uses(node, first, means, size)
    if op.packet_of(node) in op.ADDITIONS:
        uses = [_uses(node, x, means, size) for x in (first, second) if isinstance(x, fx.Node)]
        known = [row for row in uses if row is not None]
        return [use for row in known for use in row] if len(known) == len(uses) else None
    if node.target not in (*op.PRODUCTS, *op.QUOTIENTS):
        return None
    value, by = (first, second) if means.walk.varies(first) else (second, first)
    if not isinstance(value, fx.Node) or (node.target in op.QUOTIENTS and value is not first):
        return None
    power = means.counted.get(node, 0)
    if node not in means.counted:
        if not isinstance(by, int | float):
            return None
        if by % size == 0 and by:  # a number of rows or elements
            power = 1 if node.target in op.QUOTIENTS else -1
    if power:
        return [] if power == 1 else None
    return _uses(node, value, means, size)
