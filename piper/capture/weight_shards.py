"""How a parameter is sharded that a person calls "column" or "row": the dimension follows from the
product that it is the weight of, and the sections of a fused weight from where its result is split.

    linear(x, w [out, in])      column 0    row 1
    addmm(b, x, w [in, out])    column 1    row 0
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from piper.capture.chunks import Chunk, ParameterShard, Style
from piper.capture.fused import sections_of
from piper.errors import CaptureError

aten = torch.ops.aten
_PRODUCTS = {
    aten.linear.default: (1, 0, 1),
    aten.addmm.default: (2, 1, 0),
    aten.mm.default: (1, 1, 0),
    aten.matmul.default: (1, 1, 0),
    aten.embedding.default: (0, 1, 0),
}
"""The argument that is the weight, its dimension that the result has, and the one summed over."""
_BIASES = {aten.linear.default: 2, aten.addmm.default: 0}


def weight_shards(
    chunk: Chunk, wanted: Mapping[str, int | Style], ways: int
) -> dict[str, ParameterShard]:
    """The parameters of ``chunk`` that are sharded, and how."""
    graph = chunk.body.module.graph
    placeholders = graph.find_nodes(op="placeholder")[: len(chunk.parameters)]
    found = {}
    for name, node in zip(chunk.parameters, placeholders, strict=True):
        if name in wanted:
            shard = _shard(name, node, wanted[name], chunk.name)
            if shard is not None:
                _check(name, node, shard, ways, chunk.name)
                found[name] = shard
    return found


def _shard(name: str, node: fx.Node, how: int | Style, region: str) -> ParameterShard | None:
    for user in node.users:
        args = list(user.args)
        if user.target in _PRODUCTS:
            at, out, summed = _PRODUCTS[user.target]
            if len(args) > at and args[at] is node:
                dim = {Style.COLUMN: out, Style.ROW: summed}[how] if isinstance(how, Style) else how
                return ParameterShard(dim, sections_of(user) if dim == out else ())
        if user.target in _BIASES and len(args) > (at := _BIASES[user.target]) and args[at] is node:
            if how is Style.ROW:
                return None  # it is added once, to the sum
            return ParameterShard(0, sections_of(user))
    if isinstance(how, int):
        return ParameterShard(how)
    if len(node.meta["val"].shape) == 1:
        return None if how is Style.ROW else ParameterShard(0)
    raise CaptureError(
        f"{name!r} in region {region} is to be sharded by {how.value}, but it is not the weight of "
        "a linear layer there: give the number of the dimension"
    )


def _check(name: str, node: fx.Node, shard: ParameterShard, ways: int, region: str) -> None:
    shape = list(node.meta["val"].shape)
    if shard.dim >= len(shape):
        raise CaptureError(
            f"{name!r} in region {region} has shape {shape} and no dimension {shard.dim} to shard"
        )
    for size in shard.sections or (shape[shard.dim],):
        if size % ways:
            part = f" ({list(shard.sections)}, fused)" if shard.sections else ""
            fits = [str(n) for n in range(1, size + 1) if size % n == 0][:12]
            raise CaptureError(
                f"{name!r} in region {region} has {size} along dimension {shard.dim}{part}, which "
                f"{ways} devices cannot share evenly; numbers that work: {', '.join(fits)}"
            )
