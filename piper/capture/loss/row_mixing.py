"""Whether a loss is a mean over rows, with each row computed independently.

Only then do the parts of a batch (microbatches, replicas) add up to the whole batch. The exported
step enters; the first operation before the loss that mixes rows, or is not linear in a mean over
rows, leaves. A result of None proves nothing: operations without a rule, and the mixing of rows in
experts, are not judged.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.capture.blame import lines_of
from piper.capture.experts.part_rules import Mixed, PartRules, UnknownOperation
from piper.capture.graphs import ancestors, arguments
from piper.capture.repeats.folds import Fold
from piper.capture.shard.placements import REPLICATED, Placements, alike

aten = torch.ops.aten


class MixingKind(Enum):
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

    kind: MixingKind
    op: str
    at: str
    """The user's lines."""

    @property
    def of_rows(self) -> str | None:
        """The operation, if a row of its result depends on other rows in evaluation mode, too."""
        if self.kind not in (MixingKind.ROWS, MixingKind.OFFSETS):
            return None
        return f"{self.op}\n{self.at}" if self.at else self.op


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
    placed: Placements = REPLICATED
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


class RowWalk:
    """One pass over the operations before ``loss``, in their order: ``states`` holds what is known
    of each. ``inputs`` are the tensors of the batch; dimension 0 of those in ``rows`` is the batch;
    ``rules`` are those of its rows; ``folds`` are those of the graph, which must not hide what
    differs between parts."""

    def __init__(
        self,
        graph: fx.Graph,
        inputs: Collection[fx.Node],
        rows: Collection[fx.Node],
        loss: fx.Node,
        rules: PartRules,
        folds: Collection[Fold],
    ) -> None:
        self._rows, self._rules = rows, rules
        self._batch = set(inputs)
        """Nodes that depend on the batch only."""
        self.states: dict[fx.Node, RowState] = {}
        needed = ancestors([loss], ())
        for node in graph.nodes:
            if node in needed:
                self._visit(node)
        for fold in folds:
            fold.mirrored(graph, self.states.get)

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
        return RowState(RowKind.ROWS, Shard(0))

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
            return self._mixed(node, MixingKind.STATISTICS)
        if RowKind.UNKNOWN in kinds:
            return _REDUCED if _reduces(node, packet) and _is_single(node) else _UNKNOWN
        if RowKind.REDUCED in kinds:
            return self._of_reduced(node, packet, kinds)
        return self._of_rows(node, packet)

    def _of_reduced(self, node: fx.Node, packet: Any, kinds: Collection[RowKind]) -> RowState:
        if not _is_real(node):
            return _UNKNOWN
        if RowKind.ROWS in kinds:
            return self._mixed(node, MixingKind.ROWS)
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
        return self._mixed(node, MixingKind.MEAN)

    def _of_rows(self, node: fx.Node, packet: Any) -> RowState:
        states = {x: self.states[x] for x in node.all_input_nodes}
        placed = {
            x: state.placed if state.kind is RowKind.ROWS else alike(x.meta["val"], REPLICATED)
            for x, state in states.items()
        }
        try:
            return RowState(RowKind.ROWS, self._rules.of(node, placed, loose=True))
        except UnknownOperation:
            return _REDUCED if _reduces(node, packet) and _is_single(node) else _UNKNOWN
        except Mixed:
            pass
        if _reduces(node, packet):
            return RowState(RowKind.REDUCED, summed=_sums(node, packet))
        if packet in _OFFSETS and self._is_offsets(node):
            return self._mixed(node, MixingKind.OFFSETS)
        if packet in _PRODUCTS and _sums_over_rows(node, placed):
            return _REDUCED
        if packet is aten.cat:
            joined = self._rules.joined(node, placed)
            return _UNKNOWN if joined is None else RowState(RowKind.ROWS, joined)
        with_rows = [x for x, state in states.items() if state.kind is RowKind.ROWS]
        if packet in _PRODUCTS and len(with_rows) == 1:
            return _UNKNOWN  # the other may be a table repeated for every row
        if (packet in _ACROSS or _is_pointwise(node)) and _is_real(node):
            return self._mixed(node, MixingKind.ROWS)
        return _UNKNOWN

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

    def _mixed(self, node: fx.Node, kind: MixingKind) -> RowState:
        packet = getattr(node.target, "overloadpacket", node.target)
        name = str(packet).removeprefix("aten.").removeprefix("_")
        if kind is MixingKind.STATISTICS:
            name = "batch normalization"
        return RowState(RowKind.UNKNOWN, mixing=RowMixing(kind, name, lines_of(node)))


def _trains(node: fx.Node) -> bool:
    """Whether a batch norm uses the statistics of the batch."""
    given = arguments(node)
    return bool(given.get("training", given.get("train", "update" in str(node.target))))


def _is_single(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.numel() == 1


def _reduces(node: fx.Node, packet: Any) -> bool:
    """Whether ``node`` is a sum or a mean, or a loss that returns one."""
    if packet in _SUMS:
        return True
    value = node.meta["val"]
    return "reduction" in arguments(node) and isinstance(value, Tensor) and value.dim() == 0


def _sums(node: fx.Node, packet: Any) -> bool | None:
    """Whether a reduction is a sum (True) or a mean (False)."""
    if packet in (aten.sum, aten.mean):
        return packet is aten.sum
    return {1: False, 2: True}.get(arguments(node).get("reduction", 0))


def _is_real(node: fx.Node) -> bool:
    value = node.meta["val"]
    first = value if isinstance(value, Tensor) else next(iter(value), None)
    return isinstance(first, Tensor) and first.is_floating_point()


def _sums_over_rows(node: fx.Node, placed: Mapping[fx.Node, Placements]) -> bool:
    """Whether a product sums over the rows of both arguments: ``x.T @ y``."""
    if node.target not in (aten.mm.default, aten.matmul.default):
        return False
    return [placed.get(x) for x in node.args if isinstance(x, fx.Node)] == [Shard(1), Shard(0)]


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
