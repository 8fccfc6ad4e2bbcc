"""Additional checks for operations on which torch's sharding rules check too little."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from piper.capture.shard.placements import REPLICATED, SHARDED, PartPlacement

aten = torch.ops.aten

_MEAN = 1
"""``reduction=`` of a loss."""
_OF_THE_RESULT = frozenset({aten.unsqueeze.default, aten.stack.default})
"""Operations whose ``dim`` counts the dimensions of the result."""
_ARITHMETIC = frozenset({"mul", "div", "add", "sub", "rsub", "mul_", "div_", "add_", "sub_"})


def from_the_front(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments with a ``dim`` that is not negative: some rules take -1 for no dimension."""
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
    placement: Callable[[Tensor], PartPlacement],
) -> bool:
    """Whether shards can be computed independently, as far as torch's rule does not check it."""
    _, given = _named(func, args, kwargs)
    if func in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
        # shards have different numbers, or weights, of counted targets
        return bool(given["reduction"] != _MEAN)
    if func is aten.gather.default:
        x, index = given["self"], given["index"]
        here, there = placement(x), placement(index)
        if here == REPLICATED and isinstance(there, SHARDED):
            return bool(there.dim == given["dim"])
        if not isinstance(here, SHARDED) or here != there or here.dim == given["dim"]:
            return False
        return bool(x.shape[here.dim] == index.shape[here.dim])
    # no shard knows how often an index occurs
    return func is not aten.embedding.default or not given.get("scale_grad_by_freq")


def _named(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """The names of an operation's arguments, and the given arguments by name."""
    names = [argument.name for argument in func._schema.arguments]
    return names, {**dict(zip(names, args, strict=False)), **kwargs}


class Numbers(TorchDispatchMode):
    """Records the numbers that the parts of a composite operation compute with. Numbers that come
    from sizes differ between a shard and the whole."""

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
