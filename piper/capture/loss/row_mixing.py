"""Whether a loss is a mean over rows, with each row computed independently.

Only then do the parts of a batch (microbatches, replicas) add up to the whole batch. The exported
step enters; the first operation before the loss that mixes rows, or is not linear in a mean over
rows, leaves. A result of None proves nothing: operations without a rule, and the mixing of rows in
experts, are not judged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from piper.capture.blame import lines_of
from piper.capture.experts.dim_layouts import Axis, Dim, DimLayout, Factor, Mixed
from piper.capture.experts.separation import UnknownOperation, layouts_of
from piper.capture.experts.separation_rules import Layouts, plain_layouts, rule_of
from piper.capture.graphs import ancestors

aten = torch.ops.aten


class Meeting(Enum):
    """How an operation mixes rows of a batch."""

    STATISTICS = "statistics"
    """Batch normalization in training."""
    ROWS = "rows"
    """It computes a row from other rows."""
    MEAN = "mean"
    """It is not linear in a sum or mean over rows."""
    OFFSETS = "offsets"
    """It reads offsets, a tensor of the batch that would be cut like rows."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class RowMixing:
    """An operation that needs the whole batch."""

    meeting: Meeting
    op: str
    at: str
    """The user's lines."""


class RowKind(Enum):
    """How a value depends on the rows of a batch."""

    FIXED = "the same for every part"
    ROWS = "each row by itself"
    REDUCED = "linear in rows"
    UNKNOWN = "nothing is known"


@dataclass(frozen=True, slots=True)
class RowState:
    """What is known of a value."""

    kind: RowKind
    layout: Layouts = ()
    mixing: RowMixing | None = None
    summed: bool | None = None
    """Of a reduction over rows: True for a sum, False for a mean, None if unknown."""


_FIXED, _REDUCED, _UNKNOWN = map(RowState, (RowKind.FIXED, RowKind.REDUCED, RowKind.UNKNOWN))

_BATCH_NORMS = (
    aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit, aten.native_batch_norm,
    aten.batch_norm, aten._batch_norm_impl_index, aten.cudnn_batch_norm,
    aten._batch_norm_with_update_functional, aten._batch_norm_with_update,
)  # fmt: skip
_SUMS = (aten.sum, aten.mean, aten.count_nonzero, aten.nansum, aten.trace)
_LINEAR = (
    aten.to, aten._to_copy, aten.clone, aten.detach, aten.alias, aten.view, aten.reshape,
    aten.squeeze, aten.unsqueeze, aten.neg, aten.contiguous, aten.type_as, aten.expand, aten.add,
    aten.sub, aten.rsub, aten.sum, aten.mean, aten.select, aten.slice, aten.stack, aten.cat,
    aten.unbind, aten.split, aten.split_with_sizes, aten.flatten, aten.permute, aten.transpose,
    aten.t, aten.nan_to_num, aten.index_select, aten.zeros_like, aten.ones_like, aten.full_like,
    aten.lift_fresh_copy, aten.repeat, aten.diagonal, aten.trace,
)  # fmt: skip
_BILINEAR = (
    aten.mul, aten.mm, aten.bmm, aten.matmul, aten.dot, aten.mv, aten.linear, aten.addmm,
    aten.where, aten.masked_fill, aten.gather, aten.einsum,
)  # fmt: skip
_PRODUCTS = (aten.mm, aten.bmm, aten.matmul, aten.dot, aten.einsum, aten.linear, aten.addmm)
_ACROSS = (
    *_PRODUCTS, aten._softmax, aten._log_softmax, aten.softmax, aten.log_softmax, aten.logsumexp,
    aten.var, aten.std, aten.var_mean, aten.norm, aten.linalg_vector_norm, aten.roll, aten.flip,
    aten.amax, aten.amin, aten.cdist, aten.cosine_similarity,
)  # fmt: skip
_OFFSETS = (aten.slice, aten.diff, aten.cumsum, aten.searchsorted, aten.bucketize)
_CONVOLUTIONS = (aten.convolution, aten.conv1d, aten.conv2d, aten.conv3d)


def row_mixing(
    graph: fx.Graph, inputs: Collection[fx.Node], rows: Collection[fx.Node], loss: fx.Node
) -> RowMixing | None:
    """The first operation before ``loss`` that needs the whole batch. ``inputs`` are the tensors of
    the batch; dimension 0 of those in ``rows`` is the batch."""
    return RowWalk(graph, inputs, rows, loss).states[loss].mixing


class RowWalk:
    """One pass over the operations before ``loss``, in their order: ``states`` holds what is known
    of each."""

    def __init__(
        self,
        graph: fx.Graph,
        inputs: Collection[fx.Node],
        rows: Collection[fx.Node],
        loss: fx.Node,
    ) -> None:
        self._rows = rows
        self._batch = set(inputs)
        """Nodes that depend on the batch only."""
        self.states: dict[fx.Node, RowState] = {}
        self._apart: dict[str, Layouts | None] = {}
        """A cache of the layouts of operations without a rule, which are decomposed; None if that
        fails."""
        needed = ancestors([loss], ())
        for node in graph.nodes:
            if node in needed:
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.states[node] = self._given(node)
        elif node.op != "call_function":
            self.states[node] = _FIXED
        else:
            if all(x in self._batch for x in node.all_input_nodes):
                self._batch.add(node)
            self.states[node] = self._made(node)

    def _given(self, node: fx.Node) -> RowState:
        if node not in self._rows:
            return _FIXED
        return RowState(RowKind.ROWS, DimLayout.of(node.meta["val"].shape, {0: Axis.ROWS}))

    def _made(self, node: fx.Node) -> RowState:
        given = [self.states[x] for x in node.all_input_nodes]
        packet = getattr(node.target, "overloadpacket", node.target)
        for state in given:
            if state.mixing is not None:
                return state
        kinds = {state.kind for state in given}
        if kinds <= {RowKind.FIXED}:
            return _FIXED
        if packet in _BATCH_NORMS and _trains(node):
            return self._mixed(node, Meeting.STATISTICS)
        if RowKind.UNKNOWN in kinds:
            return _REDUCED if _reduces(node, packet) and _is_single(node) else _UNKNOWN
        if RowKind.REDUCED in kinds:
            return self._of_reduced(node, packet, kinds)
        return self._of_rows(node, packet)

    def _of_reduced(self, node: fx.Node, packet: Any, kinds: Collection[RowKind]) -> RowState:
        if not _is_real(node):
            return _UNKNOWN
        if RowKind.ROWS in kinds:
            return self._mixed(node, Meeting.ROWS)
        states = [(x, self.states[x].kind) for x in node.all_input_nodes]
        reduced = [x for x, kind in states if kind is RowKind.REDUCED]
        if packet in _LINEAR or node.target is operator.getitem:
            return _REDUCED
        if packet in _BILINEAR and len(reduced) == 1:
            return _REDUCED
        if packet in (aten.div, aten.true_divide) and reduced == [node.args[0]]:
            return _REDUCED
        if packet is aten.mul and all(x in self._batch for x in reduced):
            return _UNKNOWN
        return self._mixed(node, Meeting.MEAN)

    def _of_rows(self, node: fx.Node, packet: Any) -> RowState:
        layouts = {
            x: state.layout if state.kind is RowKind.ROWS else plain_layouts(x.meta["val"])
            for x, state in ((x, self.states[x]) for x in node.all_input_nodes)
        }
        try:
            return RowState(RowKind.ROWS, _simple(self._layouts(node, packet, layouts)))
        except UnknownOperation:
            return _REDUCED if _reduces(node, packet) and _is_single(node) else _UNKNOWN
        except Mixed:
            pass
        if _reduces(node, packet):
            return RowState(RowKind.REDUCED, summed=_sums(node, packet))
        if packet in _OFFSETS and self._is_offsets(node):
            return self._mixed(node, Meeting.OFFSETS)
        if packet in _PRODUCTS and _sums_over_rows(node, layouts):
            return _REDUCED
        if packet is aten.cat:
            joined = _joined(node, layouts)
            return _UNKNOWN if joined is None else RowState(RowKind.ROWS, joined)
        with_rows = [x for x in layouts if self.states[x].kind is RowKind.ROWS]
        if packet in _PRODUCTS and len(with_rows) == 1:
            return _UNKNOWN  # the other may be a table repeated for every row
        if (packet in _ACROSS or _is_pointwise(node)) and _is_real(node):
            return self._mixed(node, Meeting.ROWS)
        return _UNKNOWN

    def _layouts(self, node: fx.Node, packet: Any, layouts: Mapping[fx.Node, Layouts]) -> Layouts:
        first = node.all_input_nodes[0]
        if packet in _CONVOLUTIONS:
            return _convolved(node, layouts[first])
        if packet is aten.scaled_dot_product_attention:
            return _attended(node, layouts)
        if _is_pointwise(node):
            return _elementwise(node, layouts)
        if node.target is operator.getitem or rule_of(node.target) is not None:
            return layouts_of(node, layouts)
        layout_of: Callable[[fx.Node], Any] = layouts.__getitem__
        args = fx.node.map_arg((node.args, node.kwargs), layout_of)
        key = f"{node.target}{args!r}"
        if key not in self._apart:
            try:
                self._apart[key] = layouts_of(node, layouts)
            except UnknownOperation:
                self._apart[key] = None
        known = self._apart[key]
        if known is None:
            raise UnknownOperation(str(node.target))
        return known

    def _is_offsets(self, node: fx.Node) -> bool:
        """Whether ``node`` slices or accumulates an integer tensor of the batch with one number per
        row."""
        first = node.args[0]
        return (
            isinstance(first, fx.Node)
            and first in self._batch
            and first.meta["val"].dim() == 1
            and first.meta["val"].dtype in (torch.int32, torch.int64)
        )

    def _mixed(self, node: fx.Node, meeting: Meeting) -> RowState:
        packet = getattr(node.target, "overloadpacket", node.target)
        name = str(packet).removeprefix("aten.").removeprefix("_")
        if meeting is Meeting.STATISTICS:
            name = "batch normalization"
        return RowState(RowKind.UNKNOWN, mixing=RowMixing(meeting, name, lines_of(node)))


def _trains(node: fx.Node) -> bool:
    """Whether a batch norm uses the statistics of the batch."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("training", given.get("train", "update" in str(node.target))))


def _simple(layouts: Layouts) -> Layouts:
    """The layouts with rows kept apart and all other neighbouring factors merged."""
    if not isinstance(layouts, DimLayout):
        return tuple(x and DimLayout(tuple(map(_sizes, x.dims))) for x in layouts)
    return DimLayout(tuple(map(_sizes, layouts.dims)))


def _sizes(dim: Dim) -> Dim:
    sizes: list[Factor] = []
    for factor in dim:
        if factor.axis is None and sizes and sizes[-1].axis is None:
            sizes[-1] = Factor(sizes[-1].size * factor.size)
        elif factor.axis is not None or factor.size > 1:
            sizes.append(Factor(factor.size, factor.axis))
    return tuple(sizes)


def _is_single(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.numel() == 1


def _reduces(node: fx.Node, packet: Any) -> bool:
    """Whether ``node`` is a sum or a mean, or a loss that returns one."""
    if packet in _SUMS:
        return True
    names = [a.name for a in getattr(getattr(node.target, "_schema", None), "arguments", ())]
    value = node.meta["val"]
    return "reduction" in names and isinstance(value, Tensor) and value.dim() == 0


def _sums(node: fx.Node, packet: Any) -> bool | None:
    """Whether a reduction is a sum (True) or a mean (False)."""
    if packet in (aten.sum, aten.mean):
        return packet is aten.sum
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in arguments}
    given |= dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
    return {1: False, 2: True}.get(given.get("reduction", 0))


def _is_real(node: fx.Node) -> bool:
    value = node.meta["val"]
    first = value if isinstance(value, Tensor) else next(iter(value), None)
    return isinstance(first, Tensor) and first.is_floating_point()


def _sums_over_rows(node: fx.Node, layouts: Mapping[fx.Node, Layouts]) -> bool:
    """Whether a product sums over the rows of both arguments: ``x.T @ y``."""
    tensors = [layouts[x] for x in node.all_input_nodes]
    if len(tensors) != 2 or node.target not in (aten.mm.default, aten.matmul.default):
        return False
    a, b = tensors
    if not isinstance(a, DimLayout) or not isinstance(b, DimLayout):
        return False
    if len(a.dims) != 2 or len(b.dims) != 2:
        return False
    return a.axis(-1) is Axis.ROWS and b.axis(-2) is Axis.ROWS


def _joined(node: fx.Node, layouts: Mapping[fx.Node, Layouts]) -> DimLayout | None:
    """The layout of equal layouts concatenated along rows: a multiple of the rows of the batch."""
    parts = [layouts[x] for x in node.all_input_nodes]
    first = parts[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    if not isinstance(first, DimLayout) or any(part != first for part in parts):
        return None
    assert isinstance(dim, int)
    if node.all_input_nodes != list(node.args[0]):  # type: ignore[arg-type]
        return None
    made = (Factor(len(parts)), *first.dims[dim])
    return first.at(dim, [made])


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _elementwise(node: fx.Node, layouts: Mapping[fx.Node, Layouts]) -> DimLayout:
    """The layout of an elementwise operation. Rows must be in the same dimension of all arguments
    that have them; arguments without rows may have the same size there."""
    shape = node.meta["val"].shape
    made = DimLayout.of(shape)
    with_rows: dict[int, Dim] = {}
    for x in node.all_input_nodes:
        layout = layouts[x]
        assert isinstance(layout, DimLayout)
        for i, dim in enumerate(layout.dims, len(shape) - len(layout.dims)):
            if all(factor.axis is None for factor in dim):
                continue
            if with_rows.setdefault(i, dim) != dim or len(with_rows) > 1:
                raise Mixed(Axis.ROWS)
    for i, dim in with_rows.items():
        made = made.at(i, [dim])
    if made.shape(1) != tuple(shape):
        raise UnknownOperation(str(node.target))
    return made


def _attended(node: fx.Node, layouts: Mapping[fx.Node, Layouts]) -> DimLayout:
    """The layout of attention, which is within each row."""
    shape = node.meta["val"].shape
    made = DimLayout.of(shape, {0: Axis.ROWS})
    for x in node.all_input_nodes:
        layout = layouts[x]
        first = isinstance(layout, DimLayout) and layout.dims[0] == made.dims[0]
        mask = x not in node.args[:3] and isinstance(layout, DimLayout) and not layout.axes
        if not first and not mask:
            raise UnknownOperation(str(node.target))
    return made


def _convolved(node: fx.Node, layout: Layouts) -> Layouts:
    if not isinstance(layout, DimLayout) or layout.axis(0) is not Axis.ROWS:
        raise UnknownOperation(str(node.target))
    layout.plain(range(1, len(layout.dims)))
    rest = DimLayout.of(node.meta["val"].shape[1:])
    return DimLayout((layout.dims[0], *rest.dims))
