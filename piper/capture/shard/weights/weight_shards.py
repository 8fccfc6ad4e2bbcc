"""How a parameter is sharded by "column" or "row": the dimension follows from the product whose
weight it is, the sections of a fused weight from where the product's result is split.

    linear(x, w [out, in])                column 0    row 1
    addmm(b, x, w [in, out])              column 1    row 0
    grouped_mm(x, w [experts, in, out])   column 2    row 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from piper.base.errors import CaptureError
from piper.capture.chunk.chunks import Chunk
from piper.capture.operators.grouped_mm import EXPERT_ROWS, GROUPED_MM
from piper.capture.shard.rewrites.fused_weights import TURNS, sections_of, turned
from piper.ir.shards import ParameterShard, Style

aten = torch.ops.aten
_PRODUCTS: dict[Any, tuple[int, int, int]] = {
    aten.linear.default: (1, 0, 1),
    aten.addmm.default: (2, 1, 0),
    aten.mm.default: (1, 1, 0),
    aten.matmul.default: (1, 1, 0),
    aten.embedding.default: (0, 1, 0),
    aten.bmm.default: (1, 2, 1),
    GROUPED_MM: (1, 2, 1),
}
"""The weight's argument index, its dimension in the result, and its dimension summed over."""
_BIASES: dict[Any, int] = {aten.linear.default: 2, aten.addmm.default: 0}


def weight_shards(
    chunk: Chunk, wanted: Mapping[str, int | Style], ways: int
) -> dict[str, ParameterShard]:
    """The shards of the parameters of ``chunk`` in ``wanted``."""
    graph = chunk.body.module.graph
    placeholders = graph.find_nodes(op="placeholder")[: len(chunk.parameters)]
    shards = {}
    for name, node in zip(chunk.parameters, placeholders, strict=True):
        if name in wanted:
            shard = weight_shard(name, node, wanted[name], ways, chunk.name)
            if shard is not None:
                shards[name] = shard
    return shards


def weight_shard(
    name: str, node: fx.Node, how: int | Style, ways: int, region: str
) -> ParameterShard | None:
    """The shard of one parameter, which is ``node``; None if it stays whole."""
    shard = _shard(name, node, how, region)
    if shard is not None:
        _check(name, node, shard, ways, region)
    return shard


def _shard(name: str, node: fx.Node, how: int | Style, region: str) -> ParameterShard | None:
    shape = node.meta["val"].shape
    of_product = _of_product(node, how, list(range(len(shape))))
    if of_product is not None:
        return of_product
    if len(shape) == 1 and how is Style.ROW:
        return None  # a bias is added once, to the sum
    if len(shape) == 1:
        return ParameterShard(0, _bias_sections(node) if how in (0, Style.COLUMN) else ())
    for user in node.users:  # one bias for each expert
        if user.target is EXPERT_ROWS and how in (1, Style.COLUMN):
            return ParameterShard(1, _bias_sections(user))
        if user.target is EXPERT_ROWS and how is Style.ROW:
            return None
    if isinstance(how, int):
        return ParameterShard(how)
    raise CaptureError(
        f"{name!r} in region {region} is to be sharded by {how.value}, but it is not the weight of "
        "a linear layer there: give the number of the dimension"
    )


def _of_product(node: fx.Node, how: int | Style, dims: list[int]) -> ParameterShard | None:
    """How the weight of a product is sharded; None if ``node`` is not a weight. ``dims`` are the
    parameter's dimensions in the order of ``node``."""
    for user, out, summed in products_of(node, dims):
        dim = {Style.COLUMN: out, Style.ROW: summed}[how] if isinstance(how, Style) else how
        return ParameterShard(dim, sections_of(user) if dim == out else ())
    return None


def products_of(node: fx.Node, dims: list[int]) -> Iterator[tuple[fx.Node, int, int]]:
    """The products whose weight ``node`` is, with its dimension in the result and the one summed
    over. ``dims`` are the parameter's dimensions in the order of ``node``."""
    for user in node.users:
        if user.target in TURNS:
            yield from products_of(user, [dims[d] for d in turned(user, len(dims))])
        if user.target not in _PRODUCTS:
            continue
        at, out, summed = _PRODUCTS[user.target]
        if len(dims) == max(out, summed) + 1 and len(user.args) > at and user.args[at] is node:
            yield user, dims[out], dims[summed]


def _bias_sections(node: fx.Node) -> tuple[int, ...]:
    """The sections of the product to which a bias is added, inside it or after it."""
    for user in node.users:
        at = _BIASES.get(user.target)
        within = at is not None and len(user.args) > at and user.args[at] is node
        after = user.target is aten.add.Tensor
        if (within or after) and user.meta["val"].shape[-1] == node.meta["val"].shape[-1]:
            return sections_of(user)
    return ()


def is_vocabulary(node: fx.Node) -> bool:
    """Whether dimension 0 of a parameter indexes the tokens of an embedding, or the classes of
    logits that only a loss compares."""
    return any(
        (user.target is aten.embedding.default and user.args[0] is node)
        or (user.target is aten.linear.default and user.args[0] is not node and _are_logits(user))
        for user in node.users
    )


def _are_logits(node: fx.Node) -> bool:
    """Whether the last dimension stays unchanged up to a cross entropy or the region's end."""
    size = node.meta["val"].shape[-1]
    return all(
        user.op == "output"
        or user.target is aten.cross_entropy_loss.default
        or (len(user.all_input_nodes) == 1 and _keeps(user, size) and _are_logits(user))
        for user in node.users
    )


def _keeps(node: fx.Node, size: int) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] == size


def _check(name: str, node: fx.Node, shard: ParameterShard, ways: int, region: str) -> None:
    shape = list(node.meta["val"].shape)
    if shard.dim >= len(shape):
        raise CaptureError(
            f"{name!r} in region {region} has shape {shape} and no dimension {shard.dim} to shard"
        )
    if shard.dim == 0 and not shard.sections and shape[0] >= ways and is_vocabulary(node):
        return  # it is padded
    for size in shard.sections or (shape[shard.dim],):
        if size % ways:
            part = f" ({list(shard.sections)}, fused)" if shard.sections else ""
            fits = [str(n) for n in range(1, size + 1) if size % n == 0][:12]
            raise CaptureError(
                f"{name!r} in region {region} has {size} along dimension {shard.dim}{part}, which "
                f"{ways} devices cannot share evenly; numbers that work: {', '.join(fits)}"
            )
