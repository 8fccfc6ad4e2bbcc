"""The placement of an operation's result, from the placements of its inputs: torch's own sharding
rules, without DTensors and without a process group.

``Rules.ask`` answers for one operation of an exported graph along one mesh axis, with None if its
inputs would have to be redistributed first. It decomposes a composite operation (``linear``,
``matmul``), as torch does, and asks for each part in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo
from torch.utils import _pytree as pytree

from piper.capture.operators.grouped_mm import EXPERT_ROWS, GROUPED_MM
from piper.capture.operators.head_tail_attention import HEAD_TAIL
from piper.capture.shard.placements import REPLICATED, SHARDED, PartPlacement, Placements
from piper.capture.shard.rewrites.attention_dropout import ATTENTION, NAMES
from piper.capture.shard.rule_checks import Numbers, apart, from_the_front
from piper.capture.shard.shard_axis import ShardAxis


class Rules:
    """The sharding rules along one axis. With ``spread``, a tensor that an operation repeats once
    for each device can count as sharded."""

    def __init__(self, axis: ShardAxis, *, spread: bool = False) -> None:
        self._axis, self._spread = axis, spread
        self._mesh = DeviceMesh("cpu", torch.arange(axis.ways), _init_backend=False, _rank=0)
        self._known: dict[object, Placements | NotImplementedError | None] = {}

    def ask(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Mapping[Tensor, PartPlacement],
    ) -> Placements | None:
        """The placements of the results of ``target``; None if it cannot be computed from shards
        placed so. ``given`` has the placements of the fake tensors in its arguments."""
        try:
            return self.answer(target, args, kwargs, given)
        except NotImplementedError:
            return None

    def answer(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Mapping[Tensor, PartPlacement],
    ) -> Placements | None:
        """The same; raises ``NotImplementedError`` if there is no rule for ``target``."""
        key = _key(target, args, kwargs, given)
        if key not in self._known:
            try:
                self._known[key] = self._ask(target, args, kwargs, given)
            except NotImplementedError:
                self._known[key] = NotImplementedError(str(target))
        known = self._known[key]
        if isinstance(known, NotImplementedError):
            raise known
        return known

    def _ask(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Mapping[Tensor, PartPlacement],
    ) -> Placements | None:
        if target is ATTENTION and self._axis.head_tail:
            return _queries(args, kwargs, given)
        if target is ATTENTION:
            return _attention(args, kwargs, given)
        if target is HEAD_TAIL:
            heads = all(given.get(x, REPLICATED) == Shard(1) for x in args[:3])
            return (Shard(1), Shard(1)) if heads else None
        if target in (GROUPED_MM, EXPERT_ROWS):
            return _grouped(target, [given.get(x, REPLICATED) for x in args[:2]])
        if target is torch.ops.aten.dropout.default:
            placed = given.get(args[0], REPLICATED)
            return placed if isinstance(placed, SHARDED) else None
        made = self._run(target, args, kwargs, given, spread=False)
        if made is None and self._spread:
            return self._run(target, args, kwargs, given, spread=True)
        return made

    def _run(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Mapping[Tensor, PartPlacement],
        *,
        spread: bool,
    ) -> Placements | None:
        fake = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, FakeTensor))
        divisor = self._axis.parts if self._axis.head_tail else 1
        asking = _Asking(self._mesh, given, divisor, self._axis.ways if spread else 0)
        call = _elementwise if _is_own_elementwise(target) else target
        try:
            with torch.no_grad(), fake.fake_mode, asking:
                made = call(*args, **kwargs)
        except NotImplementedError:
            raise
        except _UNKNOWN:
            return None
        if asking.parts != [target]:
            numbers = self._on_shards(target, args, kwargs, given, fake.fake_mode)
            if asking.numbers != numbers:
                return None  # a number comes from a size, such as the row count of a mean
        return _each(made, asking.placement)

    def _on_shards(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Mapping[Tensor, PartPlacement],
        mode: FakeTensorMode,
    ) -> list[float]:
        """The numbers that an operation computes with on shards."""

        def shard(x: Tensor) -> Tensor:
            placed = given.get(x, REPLICATED)
            if not isinstance(placed, SHARDED):
                return x
            shape = list(x.shape)
            shape[placed.dim] = -(-shape[placed.dim] // self._axis.ways)
            return x.new_empty(shape)

        numbers = Numbers()
        try:
            with torch.no_grad(), mode:
                local, named = pytree.tree_map_only(Tensor, shard, (tuple(args), dict(kwargs)))
                with numbers:
                    target(*local, **named)
        except _UNKNOWN:
            pass  # its arguments have sizes, which `resized` replaces later
        return numbers.numbers


def _key(
    target: object,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Mapping[Tensor, PartPlacement],
) -> object:
    def shown(x: Any) -> object:
        if not isinstance(x, Tensor):
            return repr(x)
        return tuple(x.shape), x.stride(), x.dtype, given.get(x, REPLICATED)

    leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
    return target, tuple(map(shown, leaves)), str(tree)


class _RedistributionError(Exception):
    """An operation needs other placements of its inputs."""


_UNKNOWN = (
    _RedistributionError,
    RuntimeError,
    ValueError,
    AssertionError,
    ArithmeticError,
    LookupError,
    TypeError,
)
"""The exceptions of rules for cases that they do not know."""


class _Asking(Numbers):
    """Runs operations on fake tensors of the whole, and records the placements of the results."""

    def __init__(
        self, mesh: DeviceMesh, given: Mapping[Tensor, PartPlacement], divisor: int, spread: int
    ) -> None:
        super().__init__()
        self._mesh, self._divisor, self._spread = mesh, divisor, spread
        self._placed = dict(given)
        self.parts: list[OpOverload] = []
        """The operations that ran, more than one if a composite operation was called."""

    def placement(self, x: Tensor) -> PartPlacement:
        return self._placed.get(x, REPLICATED)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        self.parts.append(func)
        made = super().__torch_dispatch__(func, types, args, kwargs)
        taken = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(self.placement(x) != REPLICATED for x in taken):
            self._note(made, self._rule(func, args, kwargs))
        elif func is torch.ops.aten.expand.default:
            self._repeated(args[0], made)
        return made

    def _repeated(self, x: Tensor, made: Tensor) -> None:
        """Take a tensor that is repeated for each device for sharded."""
        before = (*(1,) * (made.dim() - x.dim()), *x.shape)
        for dim, (size, repeated) in enumerate(zip(before, made.shape, strict=True)):
            if size == 1 and repeated == self._spread:
                self._placed[made] = Shard(dim)

    def _rule(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        rules = DTensor._op_dispatcher.sharding_propagator
        args, kwargs = from_the_front(func, args, kwargs)
        if not apart(func, args, kwargs, self.placement):
            raise _RedistributionError
        taken, named = pytree.tree_map_only(Tensor, self._spec, (tuple(args), dict(kwargs)))
        info = rules.op_to_schema_info.get(func) or getattr(
            rules, "op_to_schema_info_for_single_dim_strategy", {}
        ).get(func)
        schema = OpSchema(func, taken, named, schema_info=info or RuntimeSchemaInfo())
        answer = rules.propagate_op_sharding_non_cached(schema)
        if answer.redistribute_schema is not None:
            pairs = zip(_specs(schema), _specs(answer.redistribute_schema), strict=True)
            if any(had.placements != needs.placements for had, needs in pairs):
                raise _RedistributionError
        return answer.output_spec

    def _spec(self, x: Tensor) -> DTensorSpec:
        meta = TensorMeta(x.shape, x.stride(), x.dtype)
        return DTensorSpec(self._mesh, (self.placement(x),), tensor_meta=meta)

    def _note(self, made: Any, specs: Any) -> None:
        made = made if isinstance(made, list | tuple) else [made]
        specs = specs if isinstance(specs, list | tuple) else [specs]
        for x, spec in zip(made, specs, strict=True):
            if isinstance(x, Tensor):
                placed = spec.placements[0]
                if isinstance(placed, Shard) and x.shape[placed.dim] % self._divisor:
                    raise _RedistributionError
                self._placed[x] = placed


def _specs(schema: OpSchema) -> list[DTensorSpec]:
    leaves = pytree.tree_leaves(
        (schema.args_schema, schema.kwargs_schema), is_leaf=lambda x: isinstance(x, DTensorSpec)
    )
    return [x for x in leaves if isinstance(x, DTensorSpec)]


def _is_own_elementwise(target: object) -> bool:
    """Whether a user's operation is tagged as elementwise; torch has rules for its own."""
    if not isinstance(target, OpOverload) or target.namespace in ("aten", "prims"):
        return False
    return torch.Tag.pointwise in target.tags


def _elementwise(*args: Any, **kwargs: Any) -> Tensor:
    """An operation on the tensors in the arguments that is elementwise and not linear."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return functools.reduce(torch.atan2, tensors).cos()


def _each(made: Any, placement: Callable[[Tensor], PartPlacement]) -> Placements:
    if isinstance(made, list | tuple):
        return tuple(_each(x, placement) if isinstance(x, Tensor) else None for x in made)
    return placement(made)


def _grouped(target: object, places: Sequence[PartPlacement]) -> Placements | None:
    """Expert weights may be sharded along the output or the summed dimension of their product,
    expert biases along the output dimension."""
    if target is EXPERT_ROWS:
        return Shard(1) if places[0] == Shard(1) else None
    if places == [REPLICATED, Shard(2)]:
        return Shard(1)
    return Partial() if places == [Shard(1), Shard(1)] else None


def _attention(
    args: Sequence[Any], kwargs: Mapping[str, Any], given: Mapping[Tensor, PartPlacement]
) -> Placements | None:
    """Rows and heads are independent; torch has no single rule for all attention kernels."""
    taken = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    places = [given.get(taken[name], REPLICATED) for name in NAMES[:3]]
    rank = len(taken["query"].shape)
    if places[0] != Shard(0) and (places[0] != Shard(1) or rank != 4):
        return None
    if any(place != places[0] for place in places):
        return None
    alike = _masked_alike(taken.get("attn_mask"), places[0].dim - rank, given)
    return places[0] if alike else None


def _queries(
    args: Sequence[Any], kwargs: Mapping[str, Any], given: Mapping[Tensor, PartPlacement]
) -> Placements | None:
    """Queries are independent if each device has all keys and values. ``is_causal`` is refused: it
    means a mask for whole sequences."""
    taken = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    places = [given.get(taken[name], REPLICATED) for name in NAMES[:3]]
    if taken.get("is_causal") or places != [Shard(2), REPLICATED, REPLICATED]:
        return None
    fits = len(taken["query"].shape) == 4 and _masked_alike(taken.get("attn_mask"), -2, given)
    return Shard(2) if fits else None


def _masked_alike(mask: Tensor | None, dim: int, given: Mapping[Tensor, PartPlacement]) -> bool:
    """Whether the mask is sharded like the scores along ``dim``, counted from the last."""
    if mask is None:
        return True
    dim += len(mask.shape)
    broadcast = dim < 0 or mask.shape[dim] == 1
    return given.get(mask, REPLICATED) == (REPLICATED if broadcast else Shard(dim))
