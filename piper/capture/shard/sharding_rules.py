"""The placement of an operation's result, from the placements of its inputs: the table of rewrites,
and torch's own sharding rules, without DTensors and without a process group.

``Rules.answer`` answers for one operation of an exported graph along one mesh axis, with None if
its inputs would have to be redistributed first. It decomposes a composite operation (``linear``,
``matmul``), as torch does, and asks for each part in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo
from torch.utils import _pytree as pytree

from piper.capture.shard.placements import REPLICATED, SHARDED, PartPlacement, Placements
from piper.capture.shard.rewrites import (  # noqa: F401 - each registers its forms
    attention,
    fused_weights,
    grouped_products,
    vocab_parallel,
)
from piper.capture.shard.rewrites.table import REWRITES, WITHOUT_TORCH
from piper.capture.shard.rule_checks import Numbers, apart, from_the_front
from piper.capture.shard.shard_axis import ShardAxis

InputPlacements = Mapping[fx.Node, Any]
"""The placements of an operation's inputs."""


@dataclass(frozen=True, slots=True)
class Question:
    """An operation on fake tensors of the whole."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: Mapping[Tensor, PartPlacement]
    """The placements of the tensors."""

    @staticmethod
    def of(
        node: fx.Node, given: InputPlacements, fakes: Mapping[fx.Node, Any] | None = None
    ) -> Question:
        """The call of a node, on ``fakes`` or the values it was traced with."""
        values = fakes or {x: x.meta["val"] for x in given}
        args, kwargs = pytree.tree_map_only(
            fx.Node, values.__getitem__, (node.args, dict(node.kwargs))
        )
        single = {values[x]: p for x, p in given.items() if isinstance(p, PartPlacement)}
        return Question(node.target, args, kwargs, single)  # type: ignore[arg-type]

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The mode of its tensors."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return next(x.fake_mode for x in leaves if isinstance(x, FakeTensor))

    def run(self, on: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
        """The results, with ``on`` applied to the tensors."""
        target = _elementwise if _is_own_elementwise(self.target) else self.target
        args, kwargs = pytree.tree_map_only(Tensor, on, (self.args, dict(self.kwargs)))
        return target(*args, **kwargs)


class Rules:
    """The sharding rules along one axis."""

    def __init__(self, axis: ShardAxis) -> None:
        self._axis = axis
        self._mesh = DeviceMesh("cpu", torch.arange(axis.ways), _init_backend=False, _rank=0)
        self._known: dict[object, Placements | NotImplementedError | None] = {}

    def answer(self, node: fx.Node, given: InputPlacements) -> Placements | None:
        """The placements of the results of an operation; None if it cannot be computed from shards
        placed so. Raises ``NotImplementedError`` if there is no rule for it."""
        key = _key(node, given)
        if key not in self._known:
            try:
                self._known[key] = self._answer(node, given)
            except NotImplementedError:
                self._known[key] = NotImplementedError(str(node.target))
        known = self._known[key]
        if isinstance(known, NotImplementedError):
            raise known
        return known

    def _answer(self, node: fx.Node, given: InputPlacements) -> Placements | None:
        for rewrite in REWRITES.get(node.target, ()):
            form = rewrite(node, given, self._axis)
            if form is not None and form.emit is None:
                return form.made
        if node.target in WITHOUT_TORCH:
            return None
        return self._ask(node, given)

    def _ask(self, node: fx.Node, given: InputPlacements) -> Placements | None:
        return self._torch(Question.of(node, given))

    def _torch(self, call: Question, spread: int = 0) -> Placements | None:
        """The answer of torch's rules. A tensor that is repeated ``spread`` times may count
        as sharded."""
        divisor = self._axis.parts if self._axis.head_tail else 1
        asking = _Asking(self._mesh, call.given, divisor, spread)
        try:
            with torch.no_grad(), call.fake_mode, asking:
                made = call.run()
        except NotImplementedError:
            raise
        except _UNKNOWN:
            return None
        if asking.parts != [call.target] and asking.numbers != self._on_shards(call):
            return None  # a number comes from a size, such as the row count of a mean
        return _each(made, asking.placement)

    def _on_shards(self, call: Question) -> list[float]:
        """The numbers that an operation computes with on shards."""

        def shard(x: Tensor) -> Tensor:
            placed = call.given.get(x, REPLICATED)
            if not isinstance(placed, SHARDED):
                return x
            shape = list(x.shape)
            shape[placed.dim] = self._axis.shard(shape[placed.dim])
            return x.new_empty(shape)

        numbers = Numbers()
        try:
            with torch.no_grad(), call.fake_mode, numbers:
                call.run(shard)
        except _UNKNOWN:
            pass  # its arguments have sizes, which `resized` replaces later
        return numbers.numbers


def _key(node: fx.Node, given: InputPlacements) -> object:
    def shown(x: Any) -> object:
        value = x.meta["val"] if isinstance(x, fx.Node) else None
        if not isinstance(value, Tensor):
            return repr(x)
        return tuple(value.shape), value.stride(), value.dtype, value.device.type, given[x]

    leaves, tree = pytree.tree_flatten((node.args, dict(node.kwargs)))
    shape = getattr(node.meta["val"], "shape", ())
    return node.target, tuple(map(shown, leaves)), str(tree), tuple(shape)


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
