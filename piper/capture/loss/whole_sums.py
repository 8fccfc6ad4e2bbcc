"""Losses that are plain sums over rows become sums over the whole batch.

The losses of the parts of a batch (microbatches, replicas) are averaged. That is exact for means. A
sum over the rows of one of P parts is multiplied by P here, so that the average is the sum over the
whole batch:

    loss = 0.5 * (x - y).square().sum() + penalty    becomes    0.5 * (P * sum) + penalty

Only sums that enter the loss linearly, and for certain, are rewritten. A sum that is divided by a
multiple of the number of rows is a mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from piper.capture.experts.part_rules import PartRules
from piper.capture.loss.row_mixing import RowKind, RowState, RowWalk
from piper.capture.repeats.folds import Fold

aten = torch.ops.aten
_CASTS = (
    aten.to, aten._to_copy, aten.clone, aten.alias, aten.view, aten.reshape, aten.squeeze,
    aten.unsqueeze, aten.neg, aten.contiguous,
)  # fmt: skip
_ADDITIONS = (aten.add, aten.sub)
_PRODUCTS = (aten.mul, aten.div, aten.true_divide)
_Use = tuple[fx.Node, fx.Node]
"""A reader, and the sum that it reads."""


def take_whole_sums(
    graph: fx.Graph,
    inputs: Collection[fx.Node],
    rows: Collection[fx.Node],
    loss: fx.Node,
    parts: int,
    rules: PartRules,
    folds: Collection[Fold],
) -> None:
    """Multiply by ``parts`` each sum over rows that ``loss`` is linear in. ``graph`` is a step on
    one of ``parts`` equal parts of a batch; dimension 0 of the inputs in ``rows`` is the batch;
    ``rules`` are those of its rows, ``folds`` those of the graph."""
    if parts == 1 or not rows:
        return
    size = next(iter(rows)).meta["val"].shape[0]
    states = RowWalk(graph, inputs, rows, loss, rules, folds).states
    for reader, summed in _uses(graph.output_node(), loss, states, size) or ():
        with graph.inserting_after(summed):
            whole = graph.call_function(aten.mul.Tensor, (summed, float(parts)))
        whole.meta = dict(summed.meta)
        reader.replace_input_with(summed, whole)


def _uses(
    reader: fx.Node, node: fx.Node, states: Mapping[fx.Node, RowState], size: int
) -> list[_Use] | None:
    """The sums over rows that ``node`` is linear in, with their readers; None if unknown."""
    state = states[node]
    if state.kind is RowKind.FIXED or state.summed is False:
        return []
    if state.summed:
        return [(reader, node)]
    if state.kind is not RowKind.REDUCED:
        return None
    packet = getattr(node.target, "overloadpacket", None)
    first, second = (*node.args, None, None)[:2]
    if packet in _CASTS and isinstance(first, fx.Node):
        return _uses(node, first, states, size)
    if packet in _ADDITIONS:
        terms = [x for x in (first, second) if isinstance(x, fx.Node)]
        uses = [_uses(node, x, states, size) for x in terms]
        known = [row for row in uses if row is not None]
        return [use for row in known for use in row] if len(known) == len(uses) else None
    if packet in _PRODUCTS:
        value, by = (second, first) if isinstance(second, fx.Node) else (first, second)
        if not isinstance(value, fx.Node) or not isinstance(by, int | float):
            return None
        if by % size == 0 and by:  # a number of rows or elements
            return None if packet is aten.mul else []
        return _uses(node, value, states, size) if value is first or packet is aten.mul else None
    return None
