"""The rules of single operations: where experts and rows are in their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from piper.capture.experts.dim_layouts import (
    Axis,
    DimLayout,
    Factor,
    Mixed,
    broadcast,
    matched,
    once,
)
from piper.capture.operators.grouped_mm import EXPERT_OFFSETS, EXPERT_ROWS, GROUPED_MM

aten = torch.ops.aten
Layouts = DimLayout | tuple[DimLayout | None, ...]
"""Of an operation's result: one tensor, or several."""

_WHOLE = 1 << 62  # a slice that ends beyond this ends with the last element, whatever the size


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operation with its arguments by name; tensors are given as their layouts."""

    op: OpOverload
    arguments: Mapping[str, Any]
    value: Any
    """The fake tensor, or tensors, that it returns."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def first(self) -> DimLayout:
        return next(x for x in self.arguments.values() if isinstance(x, DimLayout))

    def dims(self, name: str = "dim") -> list[int]:
        """The dimensions in an argument; all dimensions if it has none."""
        rank = len(self.first.dims)
        given = self.arguments.get(name)
        if given is None or given == []:
            return list(range(rank))
        return [d % rank for d in (given if isinstance(given, list | tuple) else [given])]


def plain_layouts(value: Any) -> Layouts:
    """The layout of a value with neither experts nor rows."""
    if isinstance(value, Tensor):
        return DimLayout.of(value.shape)
    if not isinstance(value, list | tuple):
        return ()
    return tuple(DimLayout.of(x.shape) if isinstance(x, Tensor) else None for x in value)


Rule = Callable[[OperatorCall], Layouts]


def rule_of(op: object) -> Rule | None:
    """How an operation treats experts and rows; None if it has no rule."""
    if not isinstance(op, OpOverload):  # an autograd function
        return None
    rule = _RULES.get(op) or _RULES.get(op.overloadpacket)
    if rule is not None:
        return rule
    if torch.Tag.pointwise in op.tags:
        return _elementwise
    names = {argument.name for argument in op._schema.arguments}
    if op.namespace == "aten" and {"dim", "keepdim"} <= names:
        return _reduced
    return _whole if op.overloadpacket in _REDUCTIONS else None


def _elementwise(call: OperatorCall) -> DimLayout:
    leaves = pytree.tree_leaves(dict(call.arguments), is_leaf=lambda x: isinstance(x, DimLayout))
    return broadcast([x for x in leaves if isinstance(x, DimLayout)])


def _same(call: OperatorCall) -> DimLayout:
    return call.first


def _whole(call: OperatorCall) -> Layouts:
    """A reduction over all elements."""
    call.first.plain(range(len(call.first.dims)))
    return plain_layouts(call.value)


def _reduced(call: OperatorCall) -> Layouts:
    """A reduction along some dimensions."""
    dims = call.dims()
    call.first.plain(dims)
    one = [()] if call["keepdim"] else []
    made = DimLayout(
        tuple(d for i, dim in enumerate(call.first.dims) for d in (one if i in dims else [dim]))
    )
    return made if isinstance(call.value, Tensor) else (made,) * len(call.value)


def _along(name: str) -> Rule:
    """An operation along some dimensions that leaves the others unchanged."""

    def rule(call: OperatorCall) -> Layouts:
        dims = call.dims(name)
        call.first.plain(dims)
        values = [call.value] if isinstance(call.value, Tensor) else call.value
        made = []
        for value in values:
            layout = call.first
            for dim in dims:
                layout = layout.at(dim, DimLayout.of([value.shape[dim]]).dims)
            made.append(layout)
        return made[0] if isinstance(call.value, Tensor) else tuple(made)

    return rule


def _viewed(call: OperatorCall) -> DimLayout:
    return call.first.viewed(call.value.shape)


def _permuted(call: OperatorCall) -> DimLayout:
    return DimLayout(tuple(call.first.dims[d] for d in call.dims("dims")))


def _transposed(call: OperatorCall) -> DimLayout:
    dims = list(call.first.dims)
    a, b = (call["dim0"], call["dim1"]) if "dim0" in call.arguments else (0, -1)
    if len(dims) > 1:
        dims[a], dims[b] = dims[b], dims[a]
    return DimLayout(tuple(dims))


def _unsqueezed(call: OperatorCall) -> DimLayout:
    dims = list(call.first.dims)
    dims.insert(call["dim"] % (len(dims) + 1), ())
    return DimLayout(tuple(dims))


def _squeezed(call: OperatorCall) -> DimLayout:
    before = call.first
    gone = [d for d in call.dims() if before.shape(1)[d] == 1]
    before.plain(gone)
    return DimLayout(tuple(dim for i, dim in enumerate(before.dims) if i not in gone))


def _expanded(call: OperatorCall) -> DimLayout:
    shape = call.value.shape
    before = (*[()] * (len(shape) - len(call.first.dims)), *call.first.dims)
    dims = []
    for size, dim in zip(shape, before, strict=True):
        kept = dim and DimLayout((dim,)).shape(1)[0] == size
        new = (Factor(size, None, repeated=True),) if size > 1 else ()
        dims.append(dim if kept else matched(dim, new))
    return DimLayout(tuple(dims))


def _sliced(call: OperatorCall) -> Layouts:
    end = call["end"]
    if call["start"] in (None, 0) and (end is None or end >= _WHOLE) and call["step"] == 1:
        return call.first
    return _along("dim")(call)


def _padded(call: OperatorCall) -> DimLayout:
    """Padding at the ends of the last dimensions; modes other than constant copy elements."""
    pad, layout = call["pad"], call.first
    if call.arguments.get("mode", "constant") != "constant":
        layout.plain(range(len(layout.dims)))
    for i in range(len(pad) // 2):
        if pad[2 * i] or pad[2 * i + 1]:
            dim = len(layout.dims) - 1 - i
            layout.plain([dim])
            layout = layout.at(dim, DimLayout.of([call.value.shape[dim]]).dims)
    return layout


def _selected(call: OperatorCall) -> DimLayout:
    call.first.plain(call.dims())
    return call.first.at(call["dim"], ())


def _unbound(call: OperatorCall) -> Layouts:
    return (_selected(call),) * len(call.value)


def _joined(call: OperatorCall) -> DimLayout:
    parts: Sequence[DimLayout] = call["tensors"]
    dim = call["dim"] % len(parts[0].dims)
    for part in parts:
        part.plain([dim])
    others = broadcast([part.at(dim, [()]) for part in parts])
    return others.at(dim, DimLayout.of([call.value.shape[dim]]).dims)


def _product(call: OperatorCall) -> DimLayout:
    """[..., n, k] times [..., k, m]."""
    *added, a, b = (x for x in call.arguments.values() if isinstance(x, DimLayout))
    a.plain([-1])
    b.plain([-2])
    batch = tuple(matched(x, y) for x, y in zip(a.dims[:-2], b.dims[:-2], strict=True))
    return broadcast([once(DimLayout((*batch, a.dims[-2], b.dims[-1]))), *added])


def _normalized(call: OperatorCall) -> Layouts:
    """A normalization over the last dimensions, with a weight and a bias of their shape."""
    last = len(call["normalized_shape"])
    rank = len(call.first.dims)
    call.first.plain(range(rank - last, rank))
    tensors = [x for x in call.arguments.values() if isinstance(x, DimLayout)]
    of_rows = DimLayout((*call.first.dims[: rank - last], *[()] * last))
    return (broadcast(tensors), of_rows, of_rows)


def _gathered(call: OperatorCall) -> DimLayout:
    """Elements picked along one dimension by an index with the same other dimensions."""
    index: DimLayout = call["index"]
    dim = call["dim"]
    call.first.plain([dim])
    index.plain([dim])
    for mine, other in zip(call.first.at(dim, [()]).dims, index.at(dim, [()]).dims, strict=True):
        if mine != other:
            axes = [f.axis for f in (*mine, *other) if f.axis is not None]
            if axes:
                raise Mixed(axes[0])
    return index


def _embedded(call: OperatorCall) -> DimLayout:
    """For each index, a row of a table."""
    table, indices = call["weight"], call["indices"]
    table.plain([0])
    if call["scale_grad_by_freq"] and Axis.ROWS in indices.axes:
        raise Mixed(Axis.ROWS)  # its backward counts equal indices over all rows
    return DimLayout((*indices.dims, table.dims[1]))


def _grouped(call: OperatorCall) -> DimLayout:
    """The product of each row with its expert's weight."""
    x, weight, offsets = call["x"], call["weight"], call["offsets"]
    _refuse_unsorted(offsets, weight)
    x.plain([1])
    weight.plain([1, 2])
    if x.axis(0) is not Axis.ROWS:
        raise Mixed(Axis.ROWS)
    return DimLayout((x.dims[0], weight.dims[2]))


def _of_experts(call: OperatorCall) -> DimLayout:
    """For each row, the entry of its expert."""
    _refuse_unsorted(call["offsets"], call.first)
    return DimLayout(((Factor(call["rows"], Axis.ROWS),), *call.first.dims[1:]))


def _refuse_unsorted(offsets: DimLayout, of: DimLayout) -> None:
    """Offsets and weights must both cover all experts, in the same order."""
    if offsets.dims[0] != of.dims[0] or of.axis(0) is not Axis.EXPERTS:
        raise Mixed(Axis.EXPERTS)


_SAME = (
    aten.clone, aten.detach, aten.alias, aten._to_copy, aten.contiguous, aten.lift_fresh_copy,
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like,
)  # fmt: skip
_ALONG = (
    aten._softmax, aten._log_softmax, aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax,
    aten.cummin, aten.sort, aten.topk, aten.split, aten.split_with_sizes,
)  # fmt: skip
_VIEWS = (aten.view.default, aten._unsafe_view, aten.reshape, aten.unflatten, aten.flatten)
_REDUCTIONS = (
    aten.sum, aten.mean, aten.prod, aten.max, aten.min, aten.any, aten.all, aten.var, aten.std,
    aten.norm, aten.argmax, aten.argmin, aten.median,
)  # fmt: skip

_RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_ALONG, _along("dim")),
    **dict.fromkeys((aten.flip, aten.roll), _along("dims")),
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm), _product),
    **dict.fromkeys((aten.transpose, aten.t), _transposed),
    aten.permute: _permuted,
    aten.unsqueeze: _unsqueezed,
    aten.squeeze: _squeezed,
    aten.expand: _expanded,
    aten.slice: _sliced,
    aten.select: _selected,
    **dict.fromkeys((aten.pad, aten.constant_pad_nd), _padded),
    aten.unbind: _unbound,
    aten.cat: _joined,
    aten.gather: _gathered,
    aten.embedding: _embedded,
    aten.native_layer_norm: _normalized,
    EXPERT_OFFSETS: lambda call: DimLayout(call.first.dims[:1]),
    GROUPED_MM: _grouped,
    EXPERT_ROWS: _of_experts,
}
