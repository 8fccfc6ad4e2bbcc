"""Capture refuses an operation that does not support the dtypes of its arguments.

Fake tensors accept dtypes that real tensors refuse: a product of float64 and float32, a softmax of
integers. So each operation whose arguments are not all of one dtype of the parameters runs once, on
zeros.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from piper.base.errors import CaptureError
from piper.base.reading import torch_name
from piper.capture.blame import user_frames
from piper.capture.graphs import ancestors, is_random
from piper.ir.tensors import TensorSpec

_SMALL = 2**20
"""An operation on at most this many elements takes no time."""
_LARGE = 2**26
"""A result of at most this many elements fits in memory. Up to this size, an operation on several
floating-point dtypes that is not elementwise is tried: it almost always fails at once."""


def refuse_dtypes(graph: fx.Graph, names: Mapping[fx.Node, str], usual: set[torch.dtype]) -> None:
    """Refuse operations of ``graph`` that torch does not support in the dtypes of their arguments.
    ``names`` names the graph's inputs, the batch first. Operations whose arguments all have the
    same dtype, one of ``usual``, are assumed to work."""
    tried: set[tuple[Any, ...]] = set()
    for node in graph.nodes:
        if not _is_plain(node):
            continue
        tensors = _tensors(node)
        kinds = tuple(x.meta["val"].dtype for x in tensors)
        key = (node.target, *kinds)
        if key in tried or (len(set(kinds)) == 1 and kinds[0] in usual) or not _is_quick(node):
            continue
        tried.add(key)
        error = _failure(node, {})
        if error is not None:
            _raise(node, tensors, names, usual, error)


def _is_plain(node: fx.Node) -> bool:
    """Whether the node is an ATen operation on tensors that draws no random numbers."""
    return (
        isinstance(node.target, OpOverload)
        and node.target.namespace == "aten"
        and not is_random(node)
        and bool(node.all_input_nodes)
        and all(isinstance(x.meta.get("val"), Tensor) for x in node.all_input_nodes)
    )


def _tensors(node: fx.Node) -> list[fx.Node]:
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [x for x in leaves if isinstance(x, fx.Node)]


def _is_quick(node: fx.Node) -> bool:
    assert isinstance(node.target, OpOverload)
    given = [x.meta["val"] for x in node.all_input_nodes]
    made = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    result = sum(math.prod(x.shape) for x in made)
    if result + sum(math.prod(x.shape) for x in given) <= _SMALL:
        return True
    mixed = len({x.dtype for x in given if x.is_floating_point()}) > 1
    return mixed and torch.Tag.pointwise not in node.target.tags and result <= _LARGE


def _failure(node: fx.Node, dtypes: Mapping[fx.Node, torch.dtype]) -> Exception | None:
    """The error of ``node`` on zeros, or None. ``dtypes`` overrides the dtypes of some inputs."""

    def zeros(arg: fx.Node) -> Tensor:
        like = arg.meta["val"]
        kind = dtypes.get(arg, like.dtype)
        if math.prod(like.shape) > _SMALL:
            return torch.zeros((), dtype=kind, device=like.device).expand(like.shape)
        return torch.zeros(like.shape, dtype=kind, device=like.device)

    assert isinstance(node.target, OpOverload)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            node.target(*fx.map_arg(node.args, zeros), **fx.map_arg(dict(node.kwargs), zeros))
    except Exception as error:  # noqa: BLE001 - the caller reports it
        return error
    return None


def _raise(
    node: fx.Node,
    tensors: list[fx.Node],
    names: Mapping[fx.Node, str],
    usual: set[torch.dtype],
    error: Exception,
) -> None:
    """Refuse ``node`` if it works with another dtype of one tensor; otherwise the dtype is not the
    cause."""
    for tensor, end, name in _origins(tensors, names):
        for dtype in (*sorted(usual, key=str), torch.int64):
            if _failure(node, dict.fromkeys([tensor], dtype)) is None:
                assert isinstance(node.target, OpOverload)
                operation = node.target._schema.name.partition("::")[2]
                given = ", ".join(str(TensorSpec.of(x.meta["val"])) for x in tensors)
                frames = user_frames(node.meta.get("stack_trace") or "")
                own = torch_name(end.meta["val"].dtype)
                mixed = ", ".join(sorted(map(torch_name, usual))) if len(usual) > 1 else ""
                raise CaptureError(
                    f"{name} is {own}, and torch's {operation} cannot "
                    f"take {given} ({str(error).splitlines()[0]}){frames and chr(10)}{frames}\n"
                    f"give it as {torch_name(dtype)}: {name}.to({dtype})"
                    f"{mixed and f', or the whole model one dtype: its parameters are {mixed}'}"
                )


def _origins(
    tensors: list[fx.Node], names: Mapping[fx.Node, str]
) -> Iterator[tuple[fx.Node, fx.Node, str]]:
    """The graph's inputs that ``tensors`` have their dtypes from, in the order of ``names``."""
    behind = {tensor: ancestors([tensor], ()) for tensor in tensors}
    for end, name in names.items():
        for tensor in tensors:
            if end in behind[tensor] and end.meta["val"].dtype == tensor.meta["val"].dtype:
                yield tensor, end, name
