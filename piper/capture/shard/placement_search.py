"""Chooses the placements in which an operation reads its inputs along an axis, and so that of its
result: the inputs as they are made, if there is a rule for that; otherwise the cheapest placements
for which there is a rule; if there is none, all inputs are gathered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Shard

from piper.capture.graphs import is_random
from piper.capture.intercept.autograd_functions import FunctionCall
from piper.capture.shard.placements import (
    REPLICATED,
    ShardedSections,
    TensorPlacement,
    alike,
    plain,
)
from piper.capture.shard.rewrites.routing import routed
from piper.capture.shard.rewrites.shapes import VIEWS, viewed
from piper.capture.shard.rewrites.table import REWRITES, Form
from piper.capture.shard.shard_axis import ShardAxis
from piper.capture.shard.sharding_rules import Rules

aten = torch.ops.aten
SUM, MEAN = Partial(), Partial("avg")
_PASS_PARTIAL = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.alias.default,
}
"""Operations that a partial sum may pass unreduced, unless another reader had it reduced."""
_ADD = {aten.add.Tensor, aten.sub.Tensor}
_TRIED = 512
"""The most combinations of input placements that are tried before all inputs are gathered."""
_COMBINED = 10_000
"""With more combinations than this, as for a concatenation of many tensors, only those that place
all inputs alike are tried."""


class Placing:
    """The placements of one graph's values that are known so far."""

    strict = False
    """Whether all inputs must be read as they are made."""

    def __init__(
        self,
        rules: Rules,
        axis: ShardAxis,
        resolved: Callable[[Tensor], TensorPlacement],
        *,
        routing: bool = False,
    ) -> None:
        self._routing = routing
        self._rules, self.axis, self.resolved = rules, axis, resolved
        self._parts = axis.parts
        self.made: dict[fx.Node, Any] = {}
        """The placement of each node."""
        self.fixed: set[fx.Node] = set()
        """Parameters and buffers, and heads of parameters."""
        self.reduced: set[fx.Node] = set()
        """Partial sums that were already reduced for some reader."""
        self.gathered: list[fx.Node] = []
        """Operations without a rule, which read gathered inputs."""
        self.free: set[fx.Node] = set()
        """Values that every device can have whole without communication."""

    def of(self, node: fx.Node) -> Form:
        """The form of an operation: how it reads its inputs, and the placement of its result."""
        now = {x: self.made[x] for x in node.all_input_nodes}
        for rewrite in REWRITES.get(node.target, ()):
            form = rewrite(node, {x: self._summed(x, p) for x, p in now.items()}, self.axis)
            if form is not None and form.emit is not None:
                return form
        if all(p == REPLICATED for p in now.values()):
            return Form(now, alike(node.meta["val"], REPLICATED))
        if self._routing and (form := routed(node, self.made, self._ask)):
            return form
        if any(isinstance(p, ShardedSections) for p in now.values()):
            apart = {x: p if isinstance(p, ShardedSections) else REPLICATED for x, p in now.items()}
            packed = self._packed(node, apart)
            if packed is not None:
                return Form(apart, packed)
            now = {x: REPLICATED if isinstance(p, ShardedSections) else p for x, p in now.items()}
        partial = [x for x, p in now.items() if isinstance(p, Partial)]
        passes = not any(x in self.reduced for x in partial) and (
            node.target in _PASS_PARTIAL
            or (node.target in _ADD and len(partial) == len(now) and not node.kwargs)
        )
        if not passes:
            now = {x: self._summed(x, p) for x, p in now.items()}
        made = self._ask(node, now)
        return self._search(node, now) if made is None else Form(now, made)

    def _summed(self, x: fx.Node, placed: Any) -> Any:
        """``placed``, or the placement of a partial sum after its reduction."""
        return self.resolved(x.meta["val"]) if isinstance(placed, Partial) else placed

    def _search(self, node: fx.Node, now: dict[fx.Node, Any]) -> Form:
        """The cheapest input placements for which there is a rule; among equals, the ones that
        shard most."""
        choices = [self._choices(x, placement) for x, placement in now.items()]
        rows: Iterable[Sequence[TensorPlacement]] = itertools.product(*choices)
        if math.prod(map(len, choices)) > _COMBINED:
            several = dict.fromkeys(itertools.chain.from_iterable(choices))
            rows = [[p if p in own else own[0] for own in choices] for p in several]
        for row in sorted(rows, key=lambda row: self._costs(now, row))[:_TRIED]:
            needs = dict(zip(now, row, strict=True))
            made = self._ask(node, needs)
            if made is not None:
                if all(p == REPLICATED for p in row):
                    self.gathered.append(node)
                return Form(needs, made)
        return self.whole(node)

    def whole(self, node: fx.Node) -> Form:
        """The form of an operation without a rule, which reads gathered inputs."""
        self.gathered.append(node)
        needs = dict.fromkeys(node.all_input_nodes, REPLICATED)
        return Form(needs, alike(node.meta["val"], REPLICATED))

    def _choices(self, x: fx.Node, now: TensorPlacement) -> list[TensorPlacement]:
        whole = x.meta["val"]
        fixed = x in self.fixed and (now != REPLICATED or len(whole.shape) > 1)
        if fixed or not isinstance(whole, Tensor):
            return [now]
        made = self.made[x]
        packed = made.dim if isinstance(made, ShardedSections) else None
        dims = [
            d for d, n in enumerate(whole.shape) if n % self._parts == 0 and n > 1 and d != packed
        ]
        return list(dict.fromkeys([now, REPLICATED, *map(Shard, dims)]))

    def _costs(
        self, now: dict[fx.Node, Any], row: Sequence[TensorPlacement]
    ) -> tuple[int, int, int]:
        """Bytes; then replicated inputs; then inputs sharded by rows: these would be redistributed
        to sharded heads before the product that merges heads, where they may be wider."""
        total = sum(self._cost(x, p) for x, p in zip(now, row, strict=True))
        return total, sum(p == REPLICATED for p in row), sum(p == Shard(0) for p in row)

    def _cost(self, x: fx.Node, placement: TensorPlacement) -> int:
        """Bytes communicated, in forward and backward, to read a value in ``placement``."""
        made, whole = self._summed(x, self.made[x]), x.meta["val"]
        if made == placement or not isinstance(whole, Tensor) or x in self.free:
            return 0
        nbytes = whole.nbytes
        if isinstance(made, Shard) and isinstance(placement, Shard):
            return 2 * nbytes // self.axis.ways
        return nbytes + (nbytes if made != REPLICATED else 0)

    def _ask(self, node: fx.Node, needs: dict[fx.Node, Any]) -> Any:
        if all(p == REPLICATED for p in needs.values()):
            return alike(node.meta["val"], REPLICATED)
        if isinstance(node.target, FunctionCall) or is_random(node):
            return None  # no rule knows its backward, or the numbers that the whole draws
        padded: set[int] = set()
        for x, placement in needs.items():
            if isinstance(placement, Shard) and isinstance(x.meta["val"], Tensor):
                shape = x.meta["val"].shape
                if placement.dim >= len(shape):
                    return None
                if shape[placement.dim] % self._parts:
                    if self.made[x] != placement:
                        return None
                    padded.add(shape[placement.dim])
        if node.target in VIEWS and not padded and Partial() not in needs.values():
            return self._viewed(node, *needs.values())
        try:
            made = self._rules.answer(node, needs)
        except NotImplementedError:
            return None
        return made if made is not None and self._fits(node.meta["val"], made, padded) else None

    def _viewed(self, node: fx.Node, placed: Shard | ShardedSections) -> Any:
        """The placement of a view."""
        (source,) = node.all_input_nodes
        shape, made, sections = source.meta["val"].shape, node.meta["val"].shape, 1
        if isinstance(placed, ShardedSections):
            sections = len(placed.sections)
            if len(set(placed.sections)) > 1:
                return None
        place = viewed(shape, made, placed.dim, sections, self._parts)
        if place is None:
            return None
        dim, sections = place
        size = made[dim] // sections
        return Shard(dim) if sections == 1 else ShardedSections(dim, (size,) * sections)

    def _fits(self, whole: Any, made: Any, padded: Collection[int]) -> bool:
        """Whether shards placed so are even, and partial results are sums, or the mean of a single
        result. If the inputs have ``padded`` dimensions of these sizes, the result must be sharded
        along one of such a size: nothing is summed over padding."""
        if isinstance(made, tuple):
            pairs = zip(whole, made, strict=True)
            return all(p is None or (self._fits(x, p, padded) and p != MEAN) for x, p in pairs)
        if isinstance(made, Shard):
            size = whole.shape[made.dim]
            return type(made) is Shard and (size in padded if padded else size % self._parts == 0)
        return made in ((REPLICATED, SUM, MEAN) if not padded else ())

    def _packed(self, node: fx.Node, now: dict[fx.Node, Any]) -> Any:
        """The placement of a result computed from a fused weight's sections, up to the operation
        that splits them; None if they cannot stay packed."""
        (first, *others) = (p for p in now.values() if isinstance(p, ShardedSections))
        if node.target in VIEWS:
            return self._viewed(node, first)
        if any(p.sections != first.sections for p in others):
            return None
        made, whole = self._ask(node, {x: plain(p) for x, p in now.items()}), node.meta["val"]
        if not isinstance(made, tuple):
            return self._in_sections(whole, made, first)
        each = [self._in_sections(x, p, first) for x, p in zip(whole, made, strict=True)]
        return None if None in each else tuple(each)

    def _in_sections(self, whole: Tensor, made: Any, first: ShardedSections) -> Any:
        """The placement of one result, computed from values sharded like ``first``."""
        if not isinstance(made, Shard):
            return made if isinstance(made, Partial) else None
        return first.on(made.dim, whole.shape[made.dim], self._parts)
