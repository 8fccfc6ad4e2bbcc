"""Proves that a region treats each expert and each row by itself.

The region's forward goes in with a layout for each argument; the layout of every value comes out,
or an error that names the operation and the line where experts or rows meet. A function of each
row alone has a derivative of each row alone, so that the backward needs no proof of its own.

An operation is known by a rule, or it is taken apart with torch's own decompositions until every
part is known. One that is neither is refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from piper.capture.blame import user_frames
from piper.capture.layouts import Axis, DimLayout, Factor, Mixed, broadcast, matched, once
from piper.capture.quiet import hushed_loggers
from piper.errors import CaptureError

aten = torch.ops.aten
Layouts = DimLayout | tuple[DimLayout | None, ...]
"""What an operation makes: one tensor, or several."""

_WHOLE = 1 << 62  # an end of a slice beyond this means the last element, however many there are

_CURES = {
    Axis.EXPERTS: "a device holds only some of the experts, so that the numbers would change: do "
    "it outside the region, or for all experts alike (torch.bmm, torch.einsum)",
    Axis.ROWS: "a device gets the rows of other devices too, so that the numbers would change: do "
    "it outside the region",
}


def prove_separate(
    graph: fx.Graph, given: Mapping[fx.Node, DimLayout], region: str
) -> dict[fx.Node, Layouts]:
    """The layout of every value of ``graph``, whose placeholders have those ``given``."""
    found: dict[fx.Node, Layouts] = dict(given)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        frames = user_frames(node.meta.get("stack_trace") or "")
        at = f"\n{frames}\n" if frames else "; "
        try:
            found[node] = layouts_of(node, found)
        except Mixed as mixed:
            raise CaptureError(
                f"region {region} mixes {mixed.axis.value}: {node.target} does not treat each "
                f"by itself{at}{_CURES[mixed.axis]}"
            ) from None
        except UnknownOperation as unknown:
            raise CaptureError(
                f"region {region} cannot run on a share of its experts: nothing is known of how "
                f"{unknown} treats experts and rows{at}do it outside the region, or write it "
                "with elementwise operations, reductions, reshapes and matrix products"
            ) from None
    return found


class UnknownOperation(Exception):  # noqa: N818 - becomes an error where the region is known
    """An operation without a rule, that torch cannot take apart."""


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation with its arguments by name; tensors are given as their layouts."""

    op: OpOverload
    arguments: Mapping[str, Any]
    value: Any
    """The fake tensor, or tensors, that it makes."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def first(self) -> DimLayout:
        return next(x for x in self.arguments.values() if isinstance(x, DimLayout))

    def dims(self, name: str = "dim") -> list[int]:
        """The dimensions that an argument names; all of them if it names none."""
        rank = len(self.first.dims)
        given = self.arguments.get(name)
        if given is None or given == []:
            return list(range(rank))
        return [d % rank for d in (given if isinstance(given, list | tuple) else [given])]


def layouts_of(node: fx.Node, known: Mapping[fx.Node, Layouts]) -> Layouts:
    """The layout of what an operation makes, or an exception that says why there is none."""
    if node.target is operator.getitem:
        made = known[node.args[0]]  # type: ignore[index]
        index = node.args[1]
        assert isinstance(made, tuple)
        assert isinstance(index, int)
        picked = made[index]
        assert picked is not None
        return picked
    value = node.meta["val"]
    if not any(_axes(known[arg]) for arg in node.all_input_nodes):
        return plain_layouts(value)
    if not isinstance(node.target, OpOverload):
        raise UnknownOperation(str(node.target))
    rule = _rule(node.target)
    if rule is None:
        return _taken_apart(node, known)
    layout_of: Callable[[fx.Node], Any] = known.__getitem__
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), layout_of)
    schema = node.target._schema.arguments
    arguments = {a.name: a.default_value for a in schema if a.has_default_value()}
    arguments |= dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    return rule(_Call(node.target, arguments, value))


def _axes(layouts: Layouts) -> bool:
    each = layouts if isinstance(layouts, tuple) else (layouts,)
    return any(layout.axes for layout in each if layout is not None)


def plain_layouts(value: Any) -> Layouts:
    """The layout of what has neither experts nor rows."""
    if isinstance(value, Tensor):
        return DimLayout.of(value.shape)
    if not isinstance(value, list | tuple):
        return ()
    return tuple(DimLayout.of(x.shape) if isinstance(x, Tensor) else None for x in value)


@cache
def _decompositions() -> Any:
    return dict(core_aten_decompositions())  # torch makes the table anew each time, slowly


def _taken_apart(node: fx.Node, known: Mapping[fx.Node, Layouts]) -> Layouts:
    """The layout of what ``node`` makes, from the operations that it consists of."""
    inputs = node.all_input_nodes
    fakes = [arg.meta["val"] for arg in inputs]
    if not all(isinstance(fake, FakeTensor) for fake in fakes):
        raise UnknownOperation(str(node.target))
    # of a single row, torch's decompositions would not show which dimension it is
    given = [_tensor(known[arg]).with_rows(Fraction(2)) for arg in inputs]

    def call(*tensors: Tensor) -> Any:
        values = dict(zip(inputs, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with torch.no_grad(), fakes[0].fake_mode:
        examples = [
            fake if layout.shape(1) == fake.shape else fake.new_empty(layout.shape(1))
            for fake, layout in zip(fakes, given, strict=True)
        ]
        try:
            with hushed_loggers():
                parts = make_fx(call, decomposition_table=_decompositions())(*examples).graph
        except (RuntimeError, ValueError, TypeError, IndexError):  # it names the number of rows
            raise UnknownOperation(str(node.target)) from None
    if any(part.target is node.target for part in parts.nodes):
        raise UnknownOperation(str(node.target))
    found: dict[fx.Node, Layouts] = dict(
        zip(parts.find_nodes(op="placeholder"), given, strict=True)
    )
    for part in parts.nodes:
        if part.op == "call_function":
            found[part] = layouts_of(part, found)
        elif part.op == "get_attr":
            found[part] = plain_layouts(part.meta["val"])
    made = parts.output_node().args[0]
    half = Fraction(1, 2)
    if isinstance(made, fx.Node):
        return _tensor(found[made]).with_rows(half)
    return tuple(
        _tensor(found[x]).with_rows(half) if isinstance(x, fx.Node) else None
        for x in pytree.tree_leaves(made)
    )


def _tensor(layouts: Layouts) -> DimLayout:
    assert isinstance(layouts, DimLayout)
    return layouts


Rule = Callable[[_Call], Layouts]


def _rule(op: OpOverload) -> Rule | None:
    rule = _RULES.get(op) or _RULES.get(op.overloadpacket)
    if rule is not None:
        return rule
    if torch.Tag.pointwise in op.tags:
        return _elementwise
    names = {argument.name for argument in op._schema.arguments}
    if op.namespace == "aten" and {"dim", "keepdim"} <= names:
        return _reduced
    return _whole if op.overloadpacket in _REDUCTIONS else None


def _elementwise(call: _Call) -> DimLayout:
    leaves = pytree.tree_leaves(dict(call.arguments), is_leaf=lambda x: isinstance(x, DimLayout))
    return broadcast([x for x in leaves if isinstance(x, DimLayout)])


def _same(call: _Call) -> DimLayout:
    return call.first


def _whole(call: _Call) -> Layouts:
    """Over all elements."""
    call.first.plain(range(len(call.first.dims)))
    return plain_layouts(call.value)


def _reduced(call: _Call) -> Layouts:
    """One element in place of all along some dimensions."""
    dims = call.dims()
    call.first.plain(dims)
    one = [()] if call["keepdim"] else []
    made = DimLayout(
        tuple(d for i, dim in enumerate(call.first.dims) for d in (one if i in dims else [dim]))
    )
    return made if isinstance(call.value, Tensor) else (made,) * len(call.value)


def _along(name: str) -> Rule:
    """An operation that looks along some dimensions, and leaves the others as they are."""

    def rule(call: _Call) -> Layouts:
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


def _viewed(call: _Call) -> DimLayout:
    return call.first.viewed(call.value.shape)


def _permuted(call: _Call) -> DimLayout:
    return DimLayout(tuple(call.first.dims[d] for d in call.dims("dims")))


def _transposed(call: _Call) -> DimLayout:
    dims = list(call.first.dims)
    a, b = (call["dim0"], call["dim1"]) if "dim0" in call.arguments else (0, -1)
    if len(dims) > 1:
        dims[a], dims[b] = dims[b], dims[a]
    return DimLayout(tuple(dims))


def _unsqueezed(call: _Call) -> DimLayout:
    dims = list(call.first.dims)
    dims.insert(call["dim"] % (len(dims) + 1), ())
    return DimLayout(tuple(dims))


def _squeezed(call: _Call) -> DimLayout:
    before = call.first
    gone = [d for d in call.dims() if before.shape(1)[d] == 1]
    before.plain(gone)
    return DimLayout(tuple(dim for i, dim in enumerate(before.dims) if i not in gone))


def _expanded(call: _Call) -> DimLayout:
    shape = call.value.shape
    before = (*[()] * (len(shape) - len(call.first.dims)), *call.first.dims)
    dims = []
    for size, dim in zip(shape, before, strict=True):
        kept = dim and DimLayout((dim,)).shape(1)[0] == size
        new = (Factor(size, None, repeated=True),) if size > 1 else ()
        dims.append(dim if kept else matched(dim, new))
    return DimLayout(tuple(dims))


def _sliced(call: _Call) -> Layouts:
    end = call["end"]
    if call["start"] in (None, 0) and (end is None or end >= _WHOLE) and call["step"] == 1:
        return call.first
    return _along("dim")(call)


def _selected(call: _Call) -> DimLayout:
    call.first.plain(call.dims())
    return call.first.at(call["dim"], ())


def _unbound(call: _Call) -> Layouts:
    return (_selected(call),) * len(call.value)


def _joined(call: _Call) -> DimLayout:
    parts: Sequence[DimLayout] = call["tensors"]
    dim = call["dim"] % len(parts[0].dims)
    for part in parts:
        part.plain([dim])
    others = broadcast([part.at(dim, [()]) for part in parts])
    return others.at(dim, DimLayout.of([call.value.shape[dim]]).dims)


def _product(call: _Call) -> DimLayout:
    """[..., n, k] times [..., k, m]."""
    *added, a, b = (x for x in call.arguments.values() if isinstance(x, DimLayout))
    a.plain([-1])
    b.plain([-2])
    batch = tuple(matched(x, y) for x, y in zip(a.dims[:-2], b.dims[:-2], strict=True))
    return broadcast([once(DimLayout((*batch, a.dims[-2], b.dims[-1]))), *added])


def _normalized(call: _Call) -> Layouts:
    """Over the last dimensions, then scaled by a weight and shifted by a bias of those."""
    last = len(call["normalized_shape"])
    rank = len(call.first.dims)
    call.first.plain(range(rank - last, rank))
    tensors = [x for x in call.arguments.values() if isinstance(x, DimLayout)]
    of_rows = DimLayout((*call.first.dims[: rank - last], *[()] * last))
    return (broadcast(tensors), of_rows, of_rows)


def _gathered(call: _Call) -> DimLayout:
    """Elements picked along one dimension by an index that has the others too."""
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
    aten.unbind: _unbound,
    aten.cat: _joined,
    aten.gather: _gathered,
    aten.native_layer_norm: _normalized,
}
