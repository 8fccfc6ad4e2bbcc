"""Where torch's rules for shards do not ask enough: what is checked before one is believed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from piper.capture.shard.placements import REPLICATED
from piper.ir.layouts import Placement

aten = torch.ops.aten

_MEAN = 1
"""The number of a reduction."""
_OF_THE_RESULT = frozenset({aten.unsqueeze.default, aten.stack.default})
"""Operations whose dimension is one of the result's."""
_ARITHMETIC = frozenset({"mul", "div", "add", "sub", "rsub", "mul_", "div_", "add_", "sub_"})


def from_the_front(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The same dimension, counted from the first one: some rules take -1 for none that exists."""
    names, given = _named(func, args, kwargs)
    first, dim = given.get(names[0]) if names else None, given.get("dim")
    if func in _OF_THE_RESULT or not isinstance(first, Tensor) or type(dim) is not int or dim >= 0:
        return args, kwargs
    dim += first.dim()
    if "dim" in kwargs:
        return args, {**kwargs, "dim": dim}
    place = names.index("dim")
    return (*args[:place], dim, *args[place + 1 :]), kwargs


def apart(
    func: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    placement: Callable[[Tensor], Placement],
) -> bool:
    """Whether shards are computed apart from each other, as far as torch's rule does not ask."""
    _, given = _named(func, args, kwargs)
    if func in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
        # shards have different numbers of targets that count, or weights of them
        return bool(given["reduction"] != _MEAN)
    if func is aten.gather.default:
        x, index = given["self"], given["index"]
        here, there = placement(x), placement(index)
        if here == REPLICATED and isinstance(there, Shard):
            return bool(there.dim == given["dim"])
        if not isinstance(here, Shard) or here != there or here.dim == given["dim"]:
            return False
        return bool(x.shape[here.dim] == index.shape[here.dim])
    # how often an index is there, no shard knows
    return func is not aten.embedding.default or not given.get("scale_grad_by_freq")


def _named(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """The names of the arguments of an operation, and those that are given."""
    names = [argument.name for argument in func._schema.arguments]
    return names, {**dict(zip(names, args, strict=False)), **kwargs}


class Numbers(TorchDispatchMode):
    """Notes the numbers that the parts of a composite operation compute with. On a shard they are
    others than on the whole where they come from sizes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: list[float] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func._schema.name.removeprefix("aten::") in _ARITHMETIC:
            self.numbers += [x for x in args if isinstance(x, int | float)]
        return func(*args, **(kwargs or {}))
