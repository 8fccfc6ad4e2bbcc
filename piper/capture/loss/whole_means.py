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

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

from piper.capture.code.chunk_program import ChunkProgram, Function
from piper.capture.code.totals import Totals
from piper.capture.experts.part_rules import Mixed, PartRules, UnknownOperation
from piper.capture.graphs import (
    ancestors,
    arguments,
    extract,
    flops,
    is_random,
    moved,
    returned,
    workspace,
)
from piper.capture.repeats.folds import Fold
from piper.capture.shard.placements import REPLICATED, Placements, alike
from piper.ir.passes import Kind, Pass, Ref
from piper.ir.tensors import TensorSpec

aten = torch.ops.aten

_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default)
_MEANS = (aten.mean.default, aten.mean.dim)
_ENTROPIES = (aten.cross_entropy_loss.default,)
_NLL = (aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
_QUOTIENTS = (aten.div.Tensor, aten.true_divide.Tensor)
_PRODUCTS = (aten.mul.Tensor,)
_ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)
_CASTS = (
    aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.detach.default,
    aten.alias.default, aten.view.default, aten.reshape.default, aten.squeeze.default,
    aten.unsqueeze.default, aten.neg.default, aten.contiguous.default, aten.to.device,
    aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten.expand.default,
)  # fmt: skip
_KEEP_DEGREE = (
    *_CASTS, *_ADDITIONS, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
    aten.maximum.default, aten.minimum.default, aten.where.self, aten.where.ScalarOther,
    aten.add.Scalar, aten.sub.Scalar, aten.clamp.Tensor, aten.where.ScalarSelf,
)  # fmt: skip
_MEAN, _SUM = 1, 2
_MOST = 1 << 20
"""Limit on the elements of a total."""


class _Kind(Enum):
    """How rows enter a value that is computed from the batch only."""

    FIXED = auto()
    """The same for every part."""
    ROWS = auto()
    """It has rows, and each row is computed from that row only."""
    ADDED = auto()
    """The value for the whole batch is the sum or the mean of the parts' values."""
    DERIVED = auto()
    """Computed from such sums and means."""


@dataclass(frozen=True, slots=True)
class _Known:
    kind: _Kind
    placed: Placements = REPLICATED
    degree: int = 0
    """It grows as this power of the number of rows: 1 for a sum over rows, 0 for a mean."""


_FIXED = _Known(_Kind.FIXED)


@dataclass(frozen=True, slots=True)
class MeanEnds:
    """The inputs and results of an exported step that the rewrite needs."""

    inputs: Mapping[fx.Node, str]
    """The tensors of the batch."""
    rows: Collection[fx.Node]
    """The inputs whose dimension 0 is the batch."""
    loss: fx.Node
    results: Collection[fx.Node]
    """Results that are averaged over the parts."""
    kept: Collection[fx.Node] = ()
    """Results that are sums already: nodes that they depend on stay unchanged."""


def take_whole_means(
    graph: fx.Graph, ends: MeanEnds, parts: int, rules: PartRules, folds: Collection[Fold]
) -> tuple[dict[fx.Node, str], Totals | None]:
    """Rewrite ``graph``, a step on one of ``parts`` equal parts of a batch. Returns its additional
    inputs, with names, and how they are computed.
    ``rules`` are those of the rows of the batch, ``folds`` those of the graph."""
    rewriting = _Rewriting(graph, ends, parts, rules)
    scope = ancestors(ends.results, ()) - ancestors(ends.kept, ())
    for node in list(graph.nodes):
        if node.op == "call_function":
            rewriting.visit(node, within=node in scope)
    for fold in folds:
        fold.mirrored(graph, rewriting.state)
    return rewriting.finished()


class _Rewriting:
    """One pass over a graph, in its order."""

    def __init__(self, graph: fx.Graph, ends: MeanEnds, parts: int, rules: PartRules) -> None:
        self._graph, self._ends, self._parts, self._rules = graph, ends, parts, rules
        self._place = returned(graph).index(ends.loss)
        self._known: dict[fx.Node, _Known] = {}
        self._varies: set[fx.Node] = set()
        """Nodes that depend on rows."""
        self._totals: dict[fx.Node, fx.Node] = {}
        """For each summed node, the input that holds its total."""
        self._one: fx.Node | None = None
        """One in each part, whose total becomes the number of batches."""
        self._counted: set[fx.Node] = set()
        """Nodes that are divided (or multiplied) by a total."""
        self._last = [*graph.find_nodes(op="placeholder")][-1]
        for node in ends.inputs:
            self._known[node] = _FIXED
            if node in ends.rows:
                self._known[node] = _Known(_Kind.ROWS, Shard(0))
                self._varies.add(node)

    def visit(self, node: fx.Node, *, within: bool) -> None:
        if not self._varies.isdisjoint(node.all_input_nodes):
            self._varies.add(node)
        if self._of_batch(node):
            known = self._state(node)
            if known is not None:
                self._known[node] = known
                return
        if within:
            self._mean_over_targets(node)
            self._divided(node)

    def state(self, node: fx.Node) -> object:
        """What is known of an operation."""
        return self._known.get(node), node in self._varies, node in self._counted

    def _of_batch(self, node: fx.Node) -> bool:
        return all(x in self._known for x in node.all_input_nodes) and not is_random(node)

    # nodes that depend on the batch only

    def _state(self, node: fx.Node) -> _Known | None:
        given = [self._known[x] for x in node.all_input_nodes]
        kinds = {known.kind for known in given}
        if kinds <= {_Kind.FIXED}:
            return _FIXED
        if _Kind.ROWS not in kinds:
            return self._of_sums(node, given)
        if kinds <= {_Kind.ROWS, _Kind.FIXED}:
            return self._of_rows(node)
        return None

    def _of_rows(self, node: fx.Node) -> _Known | None:
        placed = {
            x: known.placed if known.kind is _Kind.ROWS else alike(x.meta["val"], REPLICATED)
            for x, known in ((x, self._known[x]) for x in node.all_input_nodes)
        }
        try:
            return _Known(_Kind.ROWS, self._rules.of(node, placed))
        except Mixed:
            if node.target in (*_SUMS, *_MEANS):
                return _Known(_Kind.ADDED, degree=int(node.target in _SUMS))
        except UnknownOperation:
            pass
        return None

    def _of_sums(self, node: fx.Node, given: Sequence[_Known]) -> _Known | None:
        if not isinstance(node.meta["val"], Tensor):
            return None
        varying = [known for known in given if known.kind is not _Kind.FIXED]
        added = all(known.kind is _Kind.ADDED for known in varying)
        first, degrees = varying[0], {known.degree for known in varying}
        if added and len(given) == 1:
            if node.target in (*_CASTS, *_SUMS, *_MEANS):
                return _Known(_Kind.ADDED, degree=first.degree)
            if node.target in (*_PRODUCTS, *_QUOTIENTS) and isinstance(node.args[0], fx.Node):
                return _Known(_Kind.ADDED, degree=self._degree(node))
        if added and node.target in _ADDITIONS and len(varying) == 2 and len(degrees) == 1:
            return _Known(_Kind.ADDED, degree=first.degree)
        return _Known(_Kind.DERIVED, degree=self._derived_degree(node))

    def _derived_degree(self, node: fx.Node) -> int:
        degrees = [
            self._known[x].degree if isinstance(x, fx.Node) and x in self._known else 0
            for x in node.args
        ]
        if node.target in _QUOTIENTS:
            return degrees[0] - degrees[1]
        if node.target in _PRODUCTS:
            return sum(degrees)
        if node.target is aten.reciprocal.default:
            return -degrees[0]
        return max(degrees) if node.target in _KEEP_DEGREE else 0

    # rewrites to values of the whole batch

    def _mean_over_targets(self, node: fx.Node) -> None:
        """Rewrite a mean cross entropy over targets of the batch: a sum, divided by the number of
        targets that are not ignored (or by the sum of their class weights)."""
        if node.target not in (*_ENTROPIES, *_NLL):
            return
        given = arguments(node)
        target, weight = given["target"], given["weight"]
        known = self._known.get(target)
        counted = given["reduction"] == _MEAN and not target.meta["val"].dtype.is_floating_point
        if not counted or known is None or known.kind is not _Kind.ROWS:
            return
        if weight is not None and weight in self._varies:
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
        given["reduction"] = _SUM
        node.args, node.kwargs = tuple(given.values()), {}
        self._counted.add(self._after(node, aten.div.Tensor, count))

    def _targets(self, target: fx.Node, ignored: Any, at: fx.Node) -> fx.Node:
        """The number of targets that are not ignored."""
        counts = self._call(aten.ne.Scalar, (target, ignored), at)
        count = self._call(aten.sum.default, (counts,), at)
        self._known[count] = _Known(_Kind.ADDED, degree=1)
        return count

    def _classes(self, target: fx.Node, ignored: Any, classes: int, at: fx.Node) -> fx.Node:
        """The number of targets of each class; the last element is the number of ignored ones."""
        flat = self._call(aten.reshape.default, (target, [-1]), at)
        none = self._call(aten.eq.Scalar, (flat, ignored), at)
        which = self._call(aten.masked_fill.Scalar, (flat, none, classes), at)
        ones = self._call(aten.ones_like.default, (flat,), at)
        zeros = self._call(aten.new_zeros.default, (flat, [classes + 1]), at)
        count = self._call(aten.scatter_add.default, (zeros, 0, which, ones), at)
        self._known[count] = _Known(_Kind.ADDED, degree=1)
        return count

    def _divided(self, node: fx.Node) -> None:
        """Replace arguments of ``node`` that are sums over rows by those of the whole batch."""
        for index, x in enumerate(node.args):
            if isinstance(x, fx.Node) and self._is_summed(x):
                self._replace(node, index, x)
            elif isinstance(x, fx.Node) and index == 1 and self._is_count(node, x):
                dtype = node.meta["val"].dtype
                with self._graph.inserting_before(node):
                    node.update_arg(1, self._share(x, _at_least_fp32(dtype), 1, node))
                self._counted.add(self._retype(node, dtype))

    def _is_summed(self, x: fx.Node) -> bool:
        known = self._known.get(x)
        return (
            known is not None
            and known.kind in (_Kind.ADDED, _Kind.DERIVED)
            and x.meta["val"].numel() <= _MOST
        )

    def _is_count(self, node: fx.Node, x: fx.Node) -> bool:
        """Whether ``node`` divides by the whole batch's count, given by the caller as an input
        (``num_items_in_batch`` of transformers)."""
        while x.target in _CASTS and isinstance(x.args[0], fx.Node):
            x = x.args[0]
        given = self._ends.inputs.get(x, "").endswith("['num_items_in_batch']")
        numerator = node.args[0]
        return (
            given
            and node.target in _QUOTIENTS
            and isinstance(numerator, fx.Node)
            and numerator in self._varies
            and self._degree(numerator) == 1
        )

    def _replace(self, node: fx.Node, index: int, x: fx.Node) -> None:
        known, before = self._known[x], node.meta["val"]
        power = 0
        if node.target in (*_QUOTIENTS, *_PRODUCTS):
            other = node.args[1 - index]
            of = isinstance(other, fx.Node) and other in self._varies
            inverse = known.degree < 0 or (node.target in _QUOTIENTS and index == 1)
            if of and isinstance(other, fx.Node) and (not inverse or self._degree(other) > 0):
                power = known.degree
        with self._graph.inserting_before(node):
            whole = self._whole(x, node)
            if power:
                value = whole.meta["val"]
                kind = value.dtype if value.is_floating_point() else before.dtype
                whole = self._share(whole, _at_least_fp32(kind), power, node)
        node.update_arg(index, whole)
        last = self._retype(node, before.dtype)
        if node.target in (*_QUOTIENTS, *_PRODUCTS):
            self._counted.add(last)

    def _degree(self, node: fx.Node) -> int:
        """The power of the number of rows that a value grows as, inferred from its operations."""
        known = self._known.get(node)
        if known is not None and known.kind in (_Kind.ADDED, _Kind.DERIVED):
            return known.degree
        if node.target in _MEANS:
            return 0
        if "reduction" in (it := arguments(node)):
            return int(it["reduction"] == _SUM)
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and node.target in (*_PRODUCTS, *_QUOTIENTS):
            by = node.args[1]
            if isinstance(by, int) and by in _sizes(first):
                return self._degree(first) + (1 if node.target in _PRODUCTS else -1)
            if isinstance(by, fx.Node):
                other = self._degree(by) if by in self._varies and _is_scalar(by) else 0
                sign = -1 if node.target in _QUOTIENTS else 1
                return (self._degree(first) if first in self._varies else 0) + sign * other
        if isinstance(first, fx.Node) and _is_scalar(node) and node.target in _KEEP_DEGREE:
            return self._degree(first)
        return 1

    # nodes

    def _whole(self, x: fx.Node, at: fx.Node) -> fx.Node:
        """The value of ``x`` for the whole batch."""
        known, value = self._known.get(x), x.meta["val"]
        if known is None or known.kind in (_Kind.FIXED, _Kind.ROWS):
            return x
        if known.kind is _Kind.ADDED:
            total = self._total(x)
            if value.dim():
                total = self._call(aten.reshape.default, (total, list(value.shape)), at)
            return self._cast(total, _at_least_fp32(value.dtype), at)
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda y: self._whole(y, at), (x.args, dict(x.kwargs))
        )
        return self._call(x.target, args, at, kwargs)

    def _total(self, x: fx.Node) -> fx.Node:
        if x not in self._totals:
            value = x.meta["val"]
            shape = (1, *value.shape) if value.dim() else ()
            with self._graph.inserting_after(self._last):
                node = self._graph.placeholder(f"total{len(self._totals)}")
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
            first = next(iter(self._ends.inputs))
            wide = {"dtype": torch.float64}
            self._one = self._call(aten.new_ones.default, (first, []), at, wide)
            self._known[self._one] = _Known(_Kind.ADDED, degree=1)
        return self._total(self._one)

    def _cast(self, x: fx.Node, dtype: torch.dtype, at: fx.Node) -> fx.Node:
        if x.meta["val"].dtype is dtype:
            return x
        return self._call(aten.to.dtype, (x, dtype), at)

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        at: fx.Node,
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        node = self._graph.call_function(target, args, dict(kwargs or {}))
        node.meta = {name: x for name, x in at.meta.items() if name != "val"}
        node.meta["val"] = _made(node)
        if not self._varies.isdisjoint(node.all_input_nodes):
            self._varies.add(node)
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
        self._results(node, last)
        return last

    def _retype(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` cast back to ``dtype``, if its new arguments changed its dtype."""
        node.meta["val"] = _made(node)
        if node.meta["val"].dtype is dtype:
            return node
        readers = list(node.users)
        with self._graph.inserting_after(node):
            last = self._cast(node, dtype, node)
        for reader in readers:
            reader.replace_input_with(node, last)
        self._results(node, last)
        return last

    def _results(self, node: fx.Node, last: fx.Node) -> None:
        """Mark ``last``, and the readers of ``node``, as depending on rows if ``node`` does."""
        for x in (node, *node.users, last):
            if node in self._varies:
                self._varies.add(x)

    def _all_counted(self, node: fx.Node) -> bool:
        """Whether rows enter ``node`` only through values that are divided by a total."""
        if node in self._counted:
            return True
        terms = [x for x in node.all_input_nodes if x in self._varies]
        if node.target in _PRODUCTS:
            return any(map(self._all_counted, terms))
        linear = (*_CASTS, *_ADDITIONS, *_QUOTIENTS, *_SUMS)
        return bool(terms) and node.target in linear and all(map(self._all_counted, terms))

    def finished(self) -> tuple[dict[fx.Node, str], Totals | None]:
        if not self._totals:
            return {}, None
        sources = list(self._ends.inputs)
        targets = list(self._totals)
        module = extract(self._graph, sources, targets)
        taken = tuple(Ref(Kind.INPUT, i) for i in range(len(sources)))
        results = tuple(Ref(Kind.OUTPUT, i) for i in range(len(targets)))
        specs = dict(
            zip(
                (*taken, *results),
                (TensorSpec.of(x.meta["val"]) for x in (*sources, *targets)),
                strict=True,
            )
        )
        graph = module.graph
        function = Function(
            module=module,
            arguments=taken,
            results=results,
            flops=flops(graph),
            moved=moved(graph, fused=False),
            moved_fused=moved(graph, fused=True),
            workspace=workspace(graph),
            random=False,
        )
        program = ChunkProgram({Pass.F: function}, specs)
        means = tuple(self._known[x].degree == 0 for x in targets)
        names = {node: f"total[{i}]" for i, node in enumerate(self._totals.values())}
        loss = returned(self._graph)[self._place]
        batches = None if self._one is None else targets.index(self._one)
        return names, Totals(program, means, self._parts, self._all_counted(loss), batches)


def _sizes(node: fx.Node) -> set[int]:
    """Element counts that a reduction may have covered: products of the leading dimensions."""
    while isinstance(node, fx.Node) and _is_scalar(node) and node.args:
        first = node.args[0]
        if not isinstance(first, fx.Node):
            return set()
        node = first
    shape = node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else ()
    return {math.prod(shape[:i]) for i in range(1, len(shape) + 1)} - {1}


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 1


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _made(node: fx.Node) -> Any:
    """The fake result of an operation."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    modes = [x.meta["val"].fake_mode for x in node.all_input_nodes]
    with torch.no_grad(), modes[0]:
        return node.target(*args, **kwargs)  # type: ignore[operator]
