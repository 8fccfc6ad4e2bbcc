"""How the rows of a batch enter each value of a step.

The parts of a batch (microbatches, replicas) add up to the whole batch only if the loss is a mean
over rows, with each row computed independently. The walk finds the operations that mix rows or are
not linear in a mean over rows, the sums and means over rows, and the values that the batch alone
determines. That it finds no mixing proves nothing: operations without a rule, and the mixing of
rows in experts, are not judged.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.capture.blame import lines_of
from piper.capture.experts.part_rules import Mixed, PartRules, UnknownOperation
from piper.capture.graphs import arguments, is_random
from piper.capture.loss import reductions as op
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
    exact: bool = False
    """Whether the batch alone determines it, by rules that hold for certain."""
    degree: int | None = None
    """Of an exact reduction: it grows as this power of the number of rows, 1 for a sum over rows, 0
    for a mean."""
    added: bool = False
    """Whether the exact value for the whole batch is the sum or the mean of the parts' values."""


FIXED, _REDUCED, _UNKNOWN = map(RowState, (RowKind.FIXED, RowKind.REDUCED, RowKind.UNKNOWN))


class RowWalk:
    """A walk over the operations of a graph, in their order: ``states`` holds what is known of
    each. ``inputs`` are the tensors of the batch; dimension 0 of those in ``rows`` is the batch;
    ``rules`` are those of its rows."""

    def __init__(
        self,
        graph: fx.Graph,
        inputs: Collection[fx.Node],
        rows: Collection[fx.Node],
        rules: PartRules,
    ) -> None:
        self._rules = rules
        self._batch = set(inputs)
        """Nodes that depend on the batch only."""
        given = RowState(RowKind.ROWS, Shard(0), exact=True)
        self.states: dict[fx.Node, RowState] = {
            node: FIXED for node in graph.nodes if node.op != "call_function"
        }
        self.states |= dict.fromkeys(inputs, replace(FIXED, exact=True))
        self.states |= dict.fromkeys(rows, given)

    def visit(self, node: fx.Node) -> RowState:
        """Find the state of an operation; the operations that it reads come first."""
        if all(x in self._batch for x in node.all_input_nodes):
            self._batch.add(node)
        given = [self.states[x] for x in node.all_input_nodes]
        state = None
        if all(x.exact for x in given) and not is_random(node):
            state = self._exact(node, given)
        self.states[node] = self._made(node) if state is None else state
        return self.states[node]

    def varies(self, node: object) -> TypeGuard[fx.Node]:
        """Whether ``node`` is a value that depends on rows."""
        return isinstance(node, fx.Node) and self.states[node].kind is not RowKind.FIXED

    def _exact(self, node: fx.Node, given: Sequence[RowState]) -> RowState | None:
        """The state of an operation on exact values, if its result is exact, too."""
        reduced = [x for x in given if x.degree is not None]
        rows = any(x.kind is RowKind.ROWS for x in given)
        if reduced and not rows and isinstance(node.meta["val"], Tensor):
            degree, added = self._degree_of_sums(node, reduced)
            return replace(self._made(node), exact=True, degree=degree, added=added)
        if reduced:
            return None
        if not rows:
            return replace(FIXED, exact=True)
        try:
            placed = self._rules.of(node, self._placed(node))
        except UnknownOperation:
            return None
        except Mixed:
            packet = op.packet_of(node)
            if packet not in (*op.SUMS, *op.MEANS):
                return None
            degree = int(packet in op.SUMS)
            return replace(self._made(node), exact=True, degree=degree, added=True)
        return RowState(RowKind.ROWS, placed, exact=True)

    def _degree_of_sums(self, node: fx.Node, reduced: Sequence[RowState]) -> tuple[int, bool]:
        """The degree of an operation on reductions, and whether the parts' values still add up."""
        packet, degrees = op.packet_of(node), {x.degree or 0 for x in reduced}
        if all(x.added for x in reduced):
            alone = len(node.all_input_nodes) == 1
            if alone and packet in (*op.CASTS, *op.SUMS, *op.MEANS):
                return degrees.pop(), True
            scales = alone and node.target in (*op.PRODUCTS, *op.QUOTIENTS)
            if scales and isinstance(node.args[0], fx.Node):
                return self.degree(node), True
            if packet in op.ADDITIONS and len(reduced) == 2 and len(degrees) == 1:
                return degrees.pop(), True
        each = [self._exact_degree(x) for x in node.args]
        if node.target in op.QUOTIENTS:
            return each[0] - each[1], False
        if node.target in op.PRODUCTS:
            return sum(each), False
        if node.target is aten.reciprocal.default:
            return -each[0], False
        return max(each) if packet in op.KEEP_DEGREE else 0, False

    def _exact_degree(self, x: object) -> int:
        return (self.states[x].degree or 0) if isinstance(x, fx.Node) else 0

    def degree(self, node: fx.Node) -> int:
        """The power of the number of rows that a value grows as, inferred from its operations."""
        known = self.states.get(node)
        if known is not None and known.degree is not None:
            return known.degree
        if op.packet_of(node) in op.MEANS:
            return 0
        if "reduction" in (it := arguments(node)):
            return int(it["reduction"] == op.SUM)
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node):
            return 1
        if node.target in (*op.PRODUCTS, *op.QUOTIENTS):
            sign, by = 1 if node.target in op.PRODUCTS else -1, node.args[1]
            if isinstance(by, int) and by in op.counts_of(first):
                return self.degree(first) + sign
            if isinstance(by, fx.Node):
                other = self.degree(by) if self.varies(by) and op.is_single(by) else 0
                return (self.degree(first) if self.varies(first) else 0) + sign * other
        keeps = op.is_single(node) and op.packet_of(node) in op.KEEP_DEGREE
        return self.degree(first) if keeps else 1

    def _made(self, node: fx.Node) -> RowState:
        given = [self.states[x] for x in node.all_input_nodes]
        packet = op.packet_of(node)
        for state in given:
            if state.mixing is not None:
                return RowState(RowKind.UNKNOWN, mixing=state.mixing)
        kinds = {state.kind for state in given}
        if kinds <= {RowKind.FIXED}:
            return FIXED
        if packet in op.BATCH_NORMS and op.uses_batch(node):
            return self._mixed(node, MixingKind.STATISTICS)
        if RowKind.UNKNOWN in kinds:
            return _REDUCED if op.reduces(node, packet) and op.is_single(node) else _UNKNOWN
        if RowKind.REDUCED in kinds:
            return self._of_reduced(node, packet, kinds)
        return self._of_rows(node, packet)

    def _of_reduced(self, node: fx.Node, packet: Any, kinds: Collection[RowKind]) -> RowState:
        if not op.is_real(node):
            return _UNKNOWN
        if RowKind.ROWS in kinds:
            return self._mixed(node, MixingKind.ROWS)
        states = [(x, self.states[x].kind) for x in node.all_input_nodes]
        reduced = [x for x, kind in states if kind is RowKind.REDUCED]
        if packet in op.LINEAR or node.target is operator.getitem:
            return _REDUCED
        if packet in op.BILINEAR and len(reduced) == 1:
            return _REDUCED
        if packet in (aten.div, aten.true_divide) and reduced == [node.args[0]]:
            return _REDUCED
        if packet is aten.mul and all(x in self._batch for x in reduced):
            return _UNKNOWN
        return self._mixed(node, MixingKind.MEAN)

    def _of_rows(self, node: fx.Node, packet: Any) -> RowState:
        placed = self._placed(node)
        try:
            return RowState(RowKind.ROWS, self._rules.of(node, placed, loose=True))
        except UnknownOperation:
            return _REDUCED if op.reduces(node, packet) and op.is_single(node) else _UNKNOWN
        except Mixed:
            pass
        if op.reduces(node, packet):
            return RowState(RowKind.REDUCED, summed=op.is_sum(node, packet))
        if packet in op.OFFSETS and self._is_offsets(node):
            return self._mixed(node, MixingKind.OFFSETS)
        if packet in op.MATRIX_PRODUCTS and op.sums_over_rows(node, placed):
            return _REDUCED
        if packet is aten.cat:
            joined = self._rules.joined(node, placed)
            return _UNKNOWN if joined is None else RowState(RowKind.ROWS, joined)
        rows = [x for x in node.all_input_nodes if self.states[x].kind is RowKind.ROWS]
        if packet in op.MATRIX_PRODUCTS and len(rows) == 1:
            return _UNKNOWN  # the other may be a table repeated for every row
        if (packet in op.ACROSS or op.is_pointwise(node)) and op.is_real(node):
            return self._mixed(node, MixingKind.ROWS)
        return _UNKNOWN

    def _placed(self, node: fx.Node) -> dict[fx.Node, Placements]:
        """The placements of the inputs of an operation along the rows."""
        states = {x: self.states[x] for x in node.all_input_nodes}
        return {
            x: state.placed if state.kind is RowKind.ROWS else alike(x.meta["val"], REPLICATED)
            for x, state in states.items()
        }

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
        name = str(op.packet_of(node)).removeprefix("aten.").removeprefix("_")
        if kind is MixingKind.STATISTICS:
            name = "batch normalization"
        return RowState(RowKind.UNKNOWN, mixing=RowMixing(kind, name, lines_of(node)))
