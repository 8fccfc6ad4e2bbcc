"""Whether an operation treats each part of a dimension by itself (each expert, each row), and where
the parts are in its result.

Along an axis with one device for each part, torch's sharding rules say whether an operation can be
computed without communication. If not, it mixes parts. The rules are asked for twice the parts,
because they would not see the dimension of a single one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.distributed.tensor import Partial, Shard

from piper.capture.operators.grouped_mm import EXPERT_ROWS, GROUPED_MM
from piper.capture.shard.placements import (
    REPLICATED,
    SHARDED,
    Placements,
    alike,
    in_sections,
    sections,
)
from piper.capture.shard.rewrites.attention_dropout import ATTENTION
from piper.capture.shard.rewrites.fused_weights import dim_of
from piper.capture.shard.rewrites.shapes import VIEWS, resized, takes_sizes, viewed
from piper.capture.shard.shard_axis import PartAxis, ShardAxis
from piper.capture.shard.sharding_rules import InputPlacements, Question, Rules
from piper.capture.trace.quiet import hushed_loggers

aten = torch.ops.aten


class Mixed(Exception):  # noqa: N818 - a finding, which becomes an error where the region is known
    """An operation does not treat each part by itself."""


class UnknownOperation(Exception):  # noqa: N818 - becomes an error where the region is known
    """An operation for which torch has no sharding rule."""


@lru_cache(maxsize=16)
def part_rules(parts: int, sorted_rows: PartAxis | None = None) -> PartRules:
    """The same rules for the same arguments: a model is traced for training, for evaluation and for
    each number of rows, and torch's rules take milliseconds."""
    return PartRules(parts, sorted_rows)


class PartRules(Rules):
    """The rules along one axis of ``parts``; with ``sorted_rows``, those that rows sorted by expert
    have along this axis."""

    def __init__(self, parts: int, sorted_rows: PartAxis | None = None) -> None:
        super().__init__(ShardAxis("parts", 2 * parts, sorted_rows=sorted_rows))
        self._parts, self.sorts_rows = parts, sorted_rows is not None

    def of(
        self, node: fx.Node, known: Mapping[fx.Node, Placements], *, loose: bool = False
    ) -> Placements:
        """The placement of an operation's result; raises ``Mixed`` or ``UnknownOperation``.
        ``loose`` takes values without parts for values of each part if their size fits."""
        if node.target is operator.getitem:
            made, index = known[node.args[0]], node.args[1]  # type: ignore[index]
            assert isinstance(made, tuple)
            assert isinstance(index, int)
            picked = made[index]
            assert picked is not None
            return picked
        given = {x: known[x] for x in node.all_input_nodes}
        by_expert = self.sorts_rows and node.target in (GROUPED_MM, EXPERT_ROWS)
        if not by_expert and not any(map(_has_parts, given.values())):
            return alike(node.meta["val"], REPLICATED)
        if not isinstance(node.target, OpOverload):  # an autograd function
            raise UnknownOperation(str(node.target))
        tried = (given, given if by_expert else _repeated(node, given, loose=loose))
        for last, placed in enumerate(tried):
            try:
                answer = self.answer(node, placed)
            except NotImplementedError:
                if last:
                    raise UnknownOperation(str(node.target)) from None
            else:
                if answer is not None and not _is_partial(answer):
                    return answer
        raise Mixed

    def joined(self, node: fx.Node, placed: Mapping[fx.Node, Placements]) -> Placements | None:
        """The placement of values of one size that ``node`` concatenates along their parts; None
        if they are not such."""
        values: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        (made, *others) = {placed[x] for x in values}
        sizes = {x.meta["val"].shape for x in values}
        if others or len(sizes) > 1 or not isinstance(made, SHARDED):
            return None
        along = dim_of(node) == made.dim
        return in_sections(made.dim, len(values) * sections(made)) if along else None

    def _ask(self, node: fx.Node, given: InputPlacements) -> Placements | None:
        if node.target in VIEWS:
            return self._view(node, given)
        with hushed_loggers():
            call = Question.of(node, given, {x: _twice(x.meta["val"], p) for x, p in given.items()})
            if not takes_sizes(node.target):
                return self._spread(call)
            for shape, result in _shapes(node, given):
                target, args, kwargs = resized(call.target, call.args, call.kwargs, shape)
                made = self._spread(Question(target, args, kwargs, call.given))
                if made is not None and (made.dim if isinstance(made, SHARDED) else None) == result:
                    return made
        return None

    def _spread(self, call: Question) -> Placements | None:
        """The answer, even if a tensor that is repeated for each part must count as sharded."""
        made = self._torch(call)
        return self._torch(call, self._axis.ways) if made is None else made

    def _view(self, node: fx.Node, given: InputPlacements) -> Placements | None:
        (source,) = node.all_input_nodes
        placed, shape = given[source], source.meta["val"].shape
        wanted = node.meta["val"].shape
        parts = viewed(shape, wanted, placed.dim, sections(placed), self._parts)
        return parts and in_sections(*parts)


def _has_parts(made: Placements | None) -> bool:
    if isinstance(made, tuple):
        return any(map(_has_parts, made))
    return isinstance(made, SHARDED)


def _is_partial(made: Placements | None) -> bool:
    return any(map(_is_partial, made)) if isinstance(made, tuple) else isinstance(made, Partial)


def _twice(value: Any, placed: Placements) -> Any:
    """A tensor with twice the parts."""
    if not isinstance(value, Tensor) or isinstance(placed, tuple):
        return value
    shape = list(value.shape)
    if isinstance(placed, SHARDED):
        shape[placed.dim] *= 2
    with torch.no_grad():
        return value.new_empty(shape)


def _shapes(
    node: fx.Node, given: Mapping[fx.Node, Placements]
) -> Iterator[tuple[list[int], int | None]]:
    """The shapes that a result of given size may have for twice the parts, likely ones first, with
    the dimension of the parts."""
    shape = list(node.meta["val"].shape)
    (source, placed), *_ = ((x, p) for x, p in given.items() if isinstance(p, SHARDED))
    if node.target is aten.expand.default:  # dimensions are aligned at the last; others may grow
        dim = placed.dim + len(shape) - source.meta["val"].dim()
        yield [*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]], dim
    outside = math.prod(source.meta["val"].shape[: placed.dim]) * sections(placed)
    before = [math.prod(shape[:dim]) for dim in range(len(shape))]
    for dim in sorted(range(len(shape)), key=lambda dim: (-before[dim], dim)):
        if outside % before[dim] == 0:
            yield [*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]], dim
    yield shape, None


def _repeated(
    node: fx.Node, given: Mapping[fx.Node, Placements], *, loose: bool
) -> dict[fx.Node, Placements]:
    """``given``, but with values that were expanded to the number of parts taken for parts. If
    ``loose``, elementwise operations take any value of this size so."""
    (source, placed), *_ = ((x, p) for x, p in given.items() if _has_parts(p))
    taken = dict(given)
    if not isinstance(placed, SHARDED):
        return taken
    shape = source.meta["val"].shape
    aligned = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is ATTENTION
    for x, p in given.items():
        mine = x.meta["val"].shape if isinstance(x.meta["val"], Tensor) else ()
        dim = placed.dim - len(shape) + len(mine)
        if p != REPLICATED or dim < 0 or mine[dim] != shape[placed.dim]:
            continue
        if (loose and aligned) or _expands(x, dim):
            taken[x] = Shard(dim) if isinstance(placed, Shard) else placed
    return taken


def _expands(node: fx.Node, dim: int) -> bool:
    """Whether all elements along a dimension are the same."""
    if node.target is not aten.expand.default:
        return False
    shape = node.all_input_nodes[0].meta["val"].shape
    dim += len(shape) - len(node.meta["val"].shape)
    return bool(dim < 0 or shape[dim] == 1)
