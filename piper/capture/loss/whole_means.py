"""Weighted means, such as token-weighted losses, become means over the whole batch.

A step is computed part by part (microbatches, replicas) and averaged over the parts. This is exact
for a mean over all elements of a part. It is wrong if the divisor depends on the data:
``cross_entropy`` with ignored targets, ``(x * mask).sum() / mask.sum()``. Here such a divisor D_i
is replaced by its value D for the whole batch, divided by the number of parts P:

    sum_i / D_i    becomes    sum_i / (D / P)    whose mean over the parts is    sum / D

D must depend on the batch only, and be computed from sums over rows: the sums over the whole batch
then become inputs of the step (``Totals``). If nothing is ignored, D / P equals D_i, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from piper.capture.code.chunk_program import ChunkProgram, Function
from piper.capture.code.totals import Totals
from piper.capture.graphs import arguments, called, extract, fake_result
from piper.capture.loss import reductions as op
from piper.capture.loss.row_mixing import FIXED, RowKind, RowState, RowWalk
from piper.ir.passes import Kind, Pass, Ref
from piper.ir.tensors import TensorSpec

aten = torch.ops.aten

_ENTROPIES = (
    aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default,
    aten.nll_loss2d.default,
)  # fmt: skip
_MOST = 1 << 20
"""Limit on the elements of a total."""


class WholeMeans:
    """A rewrite of ``graph``, a step on one of ``parts`` equal parts of a batch. ``walk`` follows
    the rows of the batch in it. ``inputs`` are the tensors of the batch; only nodes in ``scope``
    are rewritten."""

    def __init__(
        self,
        graph: fx.Graph,
        walk: RowWalk,
        parts: int,
        inputs: Mapping[fx.Node, str],
        scope: Collection[fx.Node],
    ) -> None:
        self._graph, self.walk, self._parts, self._inputs = graph, walk, parts, inputs
        self._totals: dict[fx.Node, fx.Node] = {}
        """For each summed node, the input that holds its total."""
        self._one: fx.Node | None = None
        """One in each part, whose total becomes the number of batches."""
        self.counted: dict[fx.Node, int] = {}
        """Nodes that are divided (or multiplied) by a total: the power of the number of rows that
        they are divided by."""
        self._last = [*graph.find_nodes(op="placeholder")][-1]
        for node in list(graph.nodes):
            if node.op == "call_function" and not walk.visit(node).exact and node in scope:
                self._mean_over_targets(node)
                self._divided(node)

    # rewrites to values of the whole batch

    def _mean_over_targets(self, node: fx.Node) -> None:
        """Rewrite a mean cross entropy over targets of the batch: a sum, divided by the number of
        targets that are not ignored (or by the sum of their class weights)."""
        if node.target not in _ENTROPIES:
            return
        given = arguments(node)
        target, weight = given["target"], given["weight"]
        counted = given["reduction"] == op.MEAN and not target.meta["val"].dtype.is_floating_point
        rows = self._states[target].exact and self._states[target].kind is RowKind.ROWS
        if not counted or not rows or self.walk.varies(weight):
            return
        with self._graph.inserting_before(node):
            if weight is None:
                total = self._total(self._targets(target, given["ignore_index"], node))
            else:
                classes = self._classes(
                    target, given["ignore_index"], weight.meta["val"].shape[0], node
                )
                whole = self._whole(classes, node)
                whole = self._call(aten.slice.Tensor, (whole, 0, 0, -1), node)
                kind = _at_least_fp32(weight.meta["val"].dtype)
                whole = self._cast(whole, kind, node)
                total = self._call(aten.mul.Tensor, (whole, weight), node)
                total = self._call(aten.sum.default, (total,), node)
            dtype = node.meta["val"].dtype
            count = self._share(total, _at_least_fp32(dtype), 1, node)
        given["reduction"] = op.SUM
        node.args, node.kwargs = tuple(given.values()), {}
        self.walk.visit(node)
        self.counted[self._after(node, aten.div.Tensor, count)] = 1

    def _targets(self, target: fx.Node, ignored: Any, at: fx.Node) -> fx.Node:
        """The number of targets that are not ignored."""
        counts = self._call(aten.ne.Scalar, (target, ignored), at)
        return self._added(self._call(aten.sum.default, (counts,), at))

    def _classes(self, target: fx.Node, ignored: Any, classes: int, at: fx.Node) -> fx.Node:
        """The number of targets of each class; the last element is the number of ignored ones."""
        flat = self._call(aten.reshape.default, (target, [-1]), at)
        none = self._call(aten.eq.Scalar, (flat, ignored), at)
        which = self._call(aten.masked_fill.Scalar, (flat, none, classes), at)
        ones = self._call(aten.ones_like.default, (flat,), at)
        zeros = self._call(aten.new_zeros.default, (flat, [classes + 1]), at)
        return self._added(self._call(aten.scatter_add.default, (zeros, 0, which, ones), at))

    def _divided(self, node: fx.Node) -> None:
        """Replace arguments of ``node`` that are sums over rows by those of the whole batch."""
        for index, x in enumerate(node.args):
            if isinstance(x, fx.Node) and self._is_summed(x):
                self._replace(node, index, x)
            elif isinstance(x, fx.Node) and index == 1 and self._is_count(node, x):
                dtype = node.meta["val"].dtype
                with self._graph.inserting_before(node):
                    node.update_arg(1, self._share(x, _at_least_fp32(dtype), 1, node))
                self.counted[self._retype(node, dtype)] = 1

    def _is_summed(self, x: fx.Node) -> bool:
        return self._states[x].degree is not None and x.meta["val"].numel() <= _MOST

    def _is_count(self, node: fx.Node, x: fx.Node) -> bool:
        """Whether ``node`` divides by the whole batch's count, given by the caller as an input
        (``num_items_in_batch`` of transformers)."""
        while op.packet_of(x) in op.CASTS and isinstance(x.args[0], fx.Node):
            x = x.args[0]
        given = self._inputs.get(x, "").endswith("['num_items_in_batch']")
        numerator = node.args[0]
        return (
            given
            and node.target in op.QUOTIENTS
            and isinstance(numerator, fx.Node)
            and self.walk.varies(numerator)
            and self.walk.degree(numerator) == 1
        )

    def _replace(self, node: fx.Node, index: int, x: fx.Node) -> None:
        degree, before, power = self._states[x].degree or 0, node.meta["val"], 0
        scales = node.target in (*op.QUOTIENTS, *op.PRODUCTS)
        if scales and self.walk.varies(other := node.args[1 - index]):
            inverse = degree < 0 or (node.target in op.QUOTIENTS and index == 1)
            if not inverse or self.walk.degree(other) > 0:
                power = degree
        with self._graph.inserting_before(node):
            whole = self._whole(x, node)
            if power:
                value = whole.meta["val"]
                kind = value.dtype if value.is_floating_point() else before.dtype
                whole = self._share(whole, _at_least_fp32(kind), power, node)
        node.update_arg(index, whole)
        last = self._retype(node, before.dtype)
        if scales:
            self.counted[last] = power if node.target in op.QUOTIENTS and index == 1 else -power

    # nodes

    def _whole(self, x: fx.Node, at: fx.Node) -> fx.Node:
        """The value of ``x`` for the whole batch."""
        known, value = self._states[x], x.meta["val"]
        if known.degree is None:
            return x
        if known.added:
            total = self._total(x)
            if value.dim():
                total = self._call(aten.reshape.default, (total, list(value.shape)), at)
            return self._cast(total, _at_least_fp32(value.dtype), at)
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda y: self._whole(y, at), (x.args, dict(x.kwargs))
        )
        return self._call(x.target, args, at, **kwargs)

    def _total(self, x: fx.Node) -> fx.Node:
        if x not in self._totals:
            value = x.meta["val"]
            shape = (1, *value.shape) if value.dim() else ()
            with self._graph.inserting_after(self._last):
                node = self._graph.placeholder(f"total{len(self._totals)}")
            self._states[node] = FIXED
            with value.fake_mode:
                node.meta["val"] = torch.empty(shape, dtype=torch.float64, device=value.device)
            self._totals[x] = self._last = node
        return self._totals[x]

    def _share(self, x: fx.Node, dtype: torch.dtype, power: int, at: fx.Node) -> fx.Node:
        """``x`` divided by a power of the number of parts; exact if ``x`` is a multiple of it."""
        share = self._cast(x, torch.float64, at)
        target = aten.div.Tensor if power > 0 else aten.mul.Tensor
        for _ in range(abs(power)):
            share = self._call(target, (share, self._batches(at)), at)
        share = self._call(target, (share, float(self._parts ** abs(power))), at)
        return self._cast(share, dtype, at)

    def _batches(self, at: fx.Node) -> fx.Node:
        """The number of batches, which is 1, or more in an evaluation: a total, too."""
        if self._one is None:
            first = next(iter(self._inputs))
            one = self._call(aten.new_ones.default, (first, []), at, dtype=torch.float64)
            self._one = self._added(one)
        return self._total(self._one)

    def _cast(self, x: fx.Node, dtype: torch.dtype, at: fx.Node) -> fx.Node:
        if x.meta["val"].dtype is dtype:
            return x
        return self._call(aten.to.dtype, (x, dtype), at)

    def _call(self, target: Any, args: tuple[Any, ...], at: fx.Node, **kwargs: Any) -> fx.Node:
        node = called(self._graph, at, target, *args, **kwargs)
        self.walk.visit(node)
        return node

    def _added(self, node: fx.Node) -> fx.Node:
        """``node``, taken for a sum over rows."""
        self._states[node] = RowState(RowKind.REDUCED, exact=True, degree=1, added=True)
        return node

    def _after(self, node: fx.Node, target: Any, by: fx.Node) -> fx.Node:
        """Insert an operation between ``node`` and its readers; the dtype stays."""
        dtype = node.meta["val"].dtype
        readers = list(node.users)
        with self._graph.inserting_after(node):
            made = self._call(target, (node, by), node)
        with self._graph.inserting_after(made):
            last = self._cast(made, dtype, node)
        last._rename(f"{node.name}_mean")
        for reader in readers:
            reader.replace_input_with(node, last)
        return last

    def _retype(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` cast back to ``dtype``, if its new arguments changed its dtype."""
        node.meta["val"] = fake_result(node, node.all_input_nodes[0].meta["val"].fake_mode)
        self.walk.visit(node)
        if node.meta["val"].dtype is dtype:
            return node
        readers = list(node.users)
        with self._graph.inserting_after(node):
            last = self._cast(node, dtype, node)
        for reader in readers:
            reader.replace_input_with(node, last)
        return last

    def all_counted(self, node: fx.Node) -> bool:
        """Whether rows enter ``node`` only through values that are divided by a total."""
        if node in self.counted:
            return True
        terms = [x for x in node.all_input_nodes if self.walk.varies(x)]
        if node.target in op.PRODUCTS:
            return any(map(self.all_counted, terms))
        packet = op.packet_of(node)
        linear = node.target in op.QUOTIENTS or packet in (*op.CASTS, *op.ADDITIONS, *op.SUMS)
        return bool(terms) and linear and all(map(self.all_counted, terms))

    @property
    def _states(self) -> dict[fx.Node, RowState]:
        return self.walk.states

    def finished(self, loss: fx.Node) -> tuple[dict[fx.Node, str], Totals | None]:
        """The additional inputs of the graph, with names, and how they are computed. ``loss`` is
        the rewritten loss."""
        if not self._totals:
            return {}, None
        sources = list(self._inputs)
        targets = list(self._totals)
        module = extract(self._graph, sources, targets)
        taken = tuple(Ref(Kind.INPUT, i) for i in range(len(sources)))
        results = tuple(Ref(Kind.OUTPUT, i) for i in range(len(targets)))
        ends = zip((*taken, *results), (*sources, *targets), strict=True)
        specs = {ref: TensorSpec.of(node.meta["val"]) for ref, node in ends}
        program = ChunkProgram({Pass.F: Function.of(module, taken, results)}, specs)
        means = tuple(self._states[x].degree == 0 for x in targets)
        names = {node: f"total[{i}]" for i, node in enumerate(self._totals.values())}
        batches = None if self._one is None else targets.index(self._one)
        return names, Totals(program, means, self._parts, self.all_counted(loss), batches)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
