"""An operation that is said to treat each part of a dimension by itself computes the part of the
whole from the parts of its arguments."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from piper.capture.experts.part_rules import Mixed, UnknownOperation, part_rules
from piper.capture.shard.placements import REPLICATED, Placements, sections
from piper.capture.shard.rewrites.shapes import resized, takes_sizes

aten = torch.ops.aten
PARTS = 3
SHAPES = [(4, 3, 8), (12, 8), (3, 4, 8), (24, 8), (2, 12, 4), (3, 2, 2, 4), (96,)]
FAST = ("view", "slice", "cumsum")
Case = tuple[Any, tuple[Any, ...]]

ALONG: dict[str, Callable[[Tensor, int], Case]] = {
    "softmax": lambda x, d: (aten.softmax.int, (x, d)),
    "cumsum": lambda x, d: (aten.cumsum.default, (x, d)),
    "mean": lambda x, d: (aten.mean.dim, (x, [d], True)),
    "amax": lambda x, d: (aten.amax.default, (x, [d])),
    "flip": lambda x, d: (aten.flip.default, (x, [d])),
    "roll": lambda x, d: (aten.roll.default, (x, [1], [d])),
    "slice": lambda x, d: (aten.slice.Tensor, (x, d, 1, sys.maxsize)),
    "select": lambda x, d: (aten.select.int, (x, d, 0)),
    "sort": lambda x, d: (aten.sort.default, (x, d)),
    "split": lambda x, d: (aten.split.Tensor, (x, 2, d)),
    "var": lambda x, d: (aten.var.correction, (x, [d])),
    "cat": lambda x, d: (aten.cat.default, ([x, x * 2], d)),
    "unsqueeze": lambda x, d: (aten.unsqueeze.default, (x, d)),
    "transpose": lambda x, d: (aten.transpose.int, (x, d, 0)),
    "product": lambda x, d: (aten.matmul.default, (x, torch.ones(x.shape[-1], d + 2).double())),
    "norm": lambda x, d: (aten.layer_norm.default, (x, list(x.shape[d:]))),
}


def views(x: Tensor) -> Iterator[Case]:
    for a, b in itertools.product((1, 2, 3, 4, 6, 12, 24), (1, 2, 3, 4, 8, 12)):
        if x.numel() % (a * b) == 0:
            yield aten.view.default, (x, [a, b, x.numel() // (a * b)])


def cases(name: str) -> Iterator[Case]:
    for shape in SHAPES:
        x = torch.randn(shape, dtype=torch.float64)
        if name == "view":
            yield from views(x)
        else:
            yield from (ALONG[name](x, dim) for dim in range(x.dim()))


def layouts(x: Tensor) -> list[Placements]:
    """The ways in which ``x`` can have ``PARTS`` parts, or none."""
    found: list[Placements] = [REPLICATED]
    for dim, size in enumerate(x.shape):
        found += [Shard(dim)] if size % PARTS == 0 else []
        found += [_StridedShard(dim, split_factor=n) for n in (2, 4) if size % (n * PARTS) == 0]
    return found


def part(x: Tensor, placed: Any, index: int) -> Tensor:
    if placed == REPLICATED:
        return x
    before, after = x.shape[: placed.dim], x.shape[placed.dim + 1 :]
    apart = x.reshape(*before, sections(placed), PARTS, -1, *after)
    return apart.select(placed.dim + 1, index).reshape(*before, -1, *after)


def check(op: Any, args: tuple[Any, ...]) -> int:
    """Check ``op`` for some placements of its tensors; return how many it computes apart."""
    whole = op(*args)
    tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
    choices = list(itertools.product(*map(layouts, tensors)))[1:]
    apart = 0
    for placed in random.Random(0).sample(choices, min(4, len(choices))):
        graph, mode = fx.Graph(), FakeTensorMode()
        nodes = {id(x): graph.placeholder("x") for x in tensors}
        taken = pytree.tree_map_only(Tensor, lambda x, of=nodes: of[id(x)], args)
        node = graph.call_function(op, taken)
        for x in tensors:
            nodes[id(x)].meta["val"] = mode.from_tensor(x)
        node.meta["val"] = pytree.tree_map_only(Tensor, mode.from_tensor, whole)
        known = dict(zip(nodes.values(), placed, strict=True))
        try:
            made = part_rules(PARTS).of(node, known)
        except (Mixed, UnknownOperation):
            continue
        apart += 1
        places = {id(x): p for x, p in zip(tensors, placed, strict=True)}
        for i in range(PARTS):
            of_part = lambda x, i=i, at=places: part(x, at[id(x)], i)  # noqa: E731
            wholes, mades = (whole, made) if isinstance(made, tuple) else ((whole,), (made,))
            expected = [part(x, p, i) for x, p in zip(wholes, mades, strict=True)]
            call = (op, pytree.tree_map_only(Tensor, of_part, args), {})
            if takes_sizes(op):
                call = resized(*call, expected[0].shape)
            found = call[0](*call[1])
            found = found if isinstance(made, tuple) else [found]
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y)
    return apart


@pytest.mark.parametrize(
    "name",
    [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in ALONG if n not in FAST)],
)
def test_parts_that_are_computed_apart_are_those_of_the_whole(name: str) -> None:
    some = random.Random(0).sample(list(cases(name)), 40 if name == "view" else 10)
    assert sum(check(*case) for case in some) > 0


@pytest.mark.parametrize(("shape", "dim"), [((1, 3, 4, 16), 1), ((3, 4, 16), 0), ((3, 1, 1), 0)])
def test_parts_stay_where_they_are_when_other_dimensions_grow(
    shape: tuple[int, ...], dim: int
) -> None:
    graph, mode = fx.Graph(), FakeTensorMode()
    source = graph.placeholder("x")
    node = graph.call_function(aten.expand.default, (source, [2, 3, 4, 16]))
    with mode:
        source.meta["val"] = torch.empty(shape)
        node.meta["val"] = torch.empty(shape).expand(2, 3, 4, 16)
    assert part_rules(PARTS).of(node, {source: Shard(dim)}) == Shard(1)
