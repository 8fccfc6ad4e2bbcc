"""Turns a chunk's graph, with placements of its parameters and inputs along an axis, into the graph
of one device's share: every operation at local shapes, and a redistribution wherever a value is
read in another layout than it is made in.

    x R ─▶ linear(w S(0)) ─▶ S ─▶ linear(w S(1)) ─▶ P ─▶ [all_reduce] ─▶ R ─▶ add

Only the forward is propagated. The layout of a gradient follows from that of its value: S for S, R
for P, and for R a partial sum if a sharded computation reads it, else R. So each redistribution of
the forward is also one of the backward, and ``differentiate`` makes the backward of the shares.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial
from torch.utils import _pytree as pytree

from piper.capture.blame import operation_text
from piper.capture.chunk.chunks import Body
from piper.capture.chunk.recomputing import recomputed_in
from piper.capture.graphs import is_random
from piper.capture.shard.local_graph import LocalGraph, differentiable
from piper.capture.shard.local_values import LocalValues
from piper.capture.shard.placement_search import MEAN, SUM, Placing
from piper.capture.shard.placements import (
    REPLICATED,
    LocalLayout,
    Routed,
    ShardedSections,
    TensorPlacement,
    is_shard,
)
from piper.capture.shard.rewrites.graph_rewrites import rewritten
from piper.capture.shard.rewrites.shapes import resized
from piper.capture.shard.rewrites.table import Form
from piper.ir.shards import Draw, Gathered, Redistribution

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Local:
    """One device's share of a chunk."""

    graph: fx.Graph
    arguments: tuple[fx.Node, ...]
    """One for each argument of the body."""
    results: tuple[fx.Node, ...]
    """One for each result of the body."""
    sharded: frozenset[fx.Node]
    """Operations that devices along the axis compute on different shards."""
    moves: dict[fx.Node, Redistribution]
    constants: frozenset[fx.Node]
    """Values that each segment recomputes: they depend on no parameter and no input, or only on
    inputs without gradients that are smaller."""
    recomputed_by: frozenset[fx.Node]
    """The operations that may take part in recomputing constants."""
    placements: tuple[LocalLayout, ...]
    """The placements of the results."""
    rank: fx.Node | None
    """The device's index along the axis, if it is needed."""
    draws: tuple[tuple[fx.Node, Draw | None], ...]
    """Operations that draw random numbers, in the order of the whole; None if not a dropout."""
    gathered: tuple[Gathered, ...]


def propagate(
    body: Body,
    placing: Placing,
    given: Sequence[LocalLayout],
    wanted: Sequence[TensorPlacement | None],
    split: Sequence[int | None],
) -> Local:
    """The share of ``body`` on each device along an axis. ``placing`` chooses the placements of its
    values. ``given`` are those of its arguments, ``wanted`` those of its results, None where they
    are open. ``split`` are the dimensions along which to shard inputs that all devices have
    whole."""
    propagation = _Propagation(body, placing, given)
    propagation.split(split)
    for node in propagation.nodes():
        propagation.visit(node)
        propagation.note(node)
    return propagation.finished(wanted)


class MisfitError(Exception):
    """An operation has sizes, or similar arguments, of the whole."""


class _Propagation:
    def __init__(self, body: Body, placing: Placing, given: Sequence[LocalLayout]) -> None:
        first = body.fakes()[0]
        self._placing, self.axis = placing, placing.axis
        self._ways, self._device = self.axis.ways, first.device
        self._out = LocalGraph(first.fake_mode, first.device, self.axis)
        self._made = placing.made
        self._reads: Mapping[fx.Node, Any] = {}
        """The placements in which the operation that a rewrite emits reads its inputs."""
        self._local = LocalValues(placing, self._out)
        self._draws: list[tuple[fx.Node, Draw | None]] = []
        self._source = rewritten(body.module.graph, given, self.axis)
        self._inputs: list[fx.Node] = []
        placeholders = self._source.find_nodes(op="placeholder")
        for number, (node, placement) in enumerate(zip(placeholders, given, strict=True)):
            self._made[node] = placement
            local = self._out.argument(node.target, node.meta["val"], placement)
            self._local[node] = local
            if number < body.parameters + body.buffers:
                self._placing.fixed.add(node)
            else:
                self._inputs.append(node)
            if body.parameters <= number < body.parameters + body.buffers:
                self._out.constants.add(local)
        self._arguments = tuple(self._local[node] for node in placeholders)

    def split(self, dims: Sequence[int | None]) -> None:
        """Take this device's part, along ``dims``, of inputs that all devices have whole."""
        for node, dim in zip(self._inputs, dims, strict=True):
            if dim is not None:
                self._local.split(node, dim)

    def nodes(self) -> list[fx.Node]:
        return [node for node in self._source.nodes if node.op == "call_function"]

    def visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            made = self._made[source]
            self._made[node] = made[index] if isinstance(made, tuple) else made  # type: ignore[index]
            sharded = self._local[source] in self._out.sharded
            self._emit(node, operator.getitem, (self._local[source], index), {}, sharded)
            return
        form = self._placing.of(node)
        if form.emit is not None:
            self._made[node], self._reads = form.made, form.reads
            self._local[node] = form.emit(self)
            if form.fixed:
                self._placing.fixed.add(node)
            return
        if form.made == REPLICATED:
            self._local.note_derived(node)
        try:
            self._compute(node, form)
        except MisfitError:
            if self._placing.strict:
                raise
            self._compute(node, self._placing.whole(node))

    def note(self, node: fx.Node) -> None:
        """Record the placement of ``node`` on its local value."""
        made = self._made[node]
        if isinstance(made, TensorPlacement | ShardedSections | Routed):
            self._out.placed(self._local[node], made, node)
            self._local.note_free(node)

    def _compute(self, node: fx.Node, form: Form) -> None:
        needs, made = form.reads, form.made
        sharded = made != _replicated(made) or any(p != REPLICATED for p in needs.values())
        args, kwargs = pytree.tree_map_only(
            fx.Node,
            lambda x: self._local.read(x, needs.get(x), sharded),
            (node.args, dict(node.kwargs)),
        )
        self._made[node] = made
        if sharded and not isinstance(made, tuple) and is_shard(made):
            shape = self._out.shape(node.meta["val"], made)
            self._emit(node, *resized(node.target, args, kwargs, shape), sharded)
        elif made == MEAN:
            local = self._emit(node, node.target, args, kwargs, sharded)
            self._made[node] = SUM
            self._local[node] = self._out.call(aten.div.Scalar, (local, self._ways), sharded=True)
        else:
            self._emit(node, node.target, args, kwargs, sharded)

    def _drawn(self, node: fx.Node, local: fx.Node) -> None:
        draw = None
        if node.target is aten.dropout.default:
            whole, probability = node.meta["val"], node.args[1]
            assert isinstance(probability, float)
            draw = Draw(tuple(whole.shape), whole.dtype, probability)
        self._draws.append((local, draw))

    def read(self, node: fx.Node) -> fx.Node:
        return self._local.read(node, self._reads[node], True)

    def call(self, target: Any, *args: Any, sharded: bool = True, **kwargs: Any) -> fx.Node:
        return self._out.call(target, args, sharded, **kwargs)

    def run(self, function: Callable[..., Any], *given: fx.Node, sharded: bool = True) -> Any:
        return self._out.run(function, *given, sharded=sharded)

    def rank(self) -> fx.Node:
        return self._out.rank()

    def positions(self, size: int) -> fx.Node:
        return self._out.positions(self.rank(), size)

    def noise(self, dropout: fx.Node, dim: int) -> fx.Node:
        whole = dropout.meta["val"]
        size, kind = list(whole.shape), {"dtype": whole.dtype, "device": self._device}
        ones = self._out.call(aten.ones.default, (size,), True, **kind)
        self._out.constants.add(ones)
        noise = self._out.call(aten.dropout.default, (ones, *dropout.args[1:]), True)
        self._drawn(dropout, noise)
        return self._out.slice(noise, dim)

    def moved(
        self, local: fx.Node, made: TensorPlacement, wanted: TensorPlacement, *, sharded: bool
    ) -> fx.Node:
        return self._out.redistributed(local, made, wanted, before=True, after=sharded)

    def _emit(self, node: fx.Node, target: Any, args: Any, kwargs: Any, sharded: bool) -> fx.Node:
        taken = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Node)]
        try:
            local = self._called(target, tuple(args), sharded, kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            raise MisfitError(str(error)) from error
        self._check(node, local)
        self._local[node] = local
        if all(x in self._out.constants for x in taken) and not is_random(node):
            self._out.constants.add(local)
        if is_random(node):
            self._drawn(node, local)
        for key in ("nn_module_stack", "stack_trace"):
            local.meta[key] = node.meta.get(key)
        return local

    def _called(self, target: Any, args: Any, sharded: bool, kwargs: Any) -> fx.Node:
        try:
            return self._out.call(target, args, sharded, **kwargs)
        except ValueError:
            if target not in (aten.view.default, aten._unsafe_view.default):
                raise
            return self._out.call(aten.reshape.default, args, sharded)  # other strides, once moved

    def _check(self, node: fx.Node, local: fx.Node) -> None:
        """Raise ``MisfitError`` if a local result does not have the shape of its shard."""
        wholes, values, made = node.meta["val"], local.meta["val"], self._made[node]
        if not isinstance(made, tuple):
            wholes, values, made = [wholes], [values], [made]
        for whole, value, placement in zip(wholes, values, made, strict=True):
            if not isinstance(value, Tensor) or placement is None:
                continue
            shape = self._out.shape(whole, placement)
            if tuple(value.shape) != shape:
                raise MisfitError(
                    f"{node.target} makes {list(value.shape)} there, not {list(shape)}"
                )

    def finished(self, wanted: Sequence[TensorPlacement | None]) -> Local:
        ends = pytree.tree_leaves(self._source.output_node().args[0])
        placements = [
            self._natural(node) if placement is None else placement
            for node, placement in zip(ends, wanted, strict=True)
        ]
        results = [
            self._local.read(node, placement, placement != REPLICATED)
            for node, placement in zip(ends, placements, strict=True)
        ]
        self._out.graph.output(tuple(results))
        self._out.graph.eliminate_dead_code()
        left = set(self._out.graph.nodes)
        first = len(self._arguments) - len(self._inputs)
        inputs = [x for x in self._arguments[first:] if not differentiable(x)]
        again, by = recomputed_in(self._out.graph, inputs, self._out.constants, self._out.moves)
        return Local(
            self._out.graph,
            self._arguments,
            tuple(results),
            frozenset(self._out.sharded & left),
            {node: move for node, move in self._out.moves.items() if node in left},
            frozenset(self._out.constants & left) | again,
            frozenset(self._out.constants & left) | by,
            tuple(placements),
            self._out.rank_node,
            tuple(self._draws),
            tuple(map(self._gathered, dict.fromkeys(self._placing.gathered))),
        )

    def _gathered(self, node: fx.Node) -> Gathered:
        """The cost of an operation without a rule: gathers, and reductions of gradients."""
        nbytes = 0
        for x in node.all_input_nodes:
            moved = self._made[x] != REPLICATED and x not in self._placing.free
            if moved and isinstance(whole := x.meta["val"], Tensor):
                passes = 2 if differentiable(self._local[x]) else 1
                nbytes += passes * whole.nbytes
        return Gathered(operation_text(node), nbytes * (self._ways - 1) // self._ways)

    def _natural(self, node: fx.Node) -> LocalLayout:
        """The placement of a result that readers leave open: as made; a partial sum is reduced."""
        made = self._made[node]
        if isinstance(made, Partial):
            return self._placing.resolved(node.meta["val"])
        return made if is_shard(made) or isinstance(made, Routed) else REPLICATED


def _replicated(made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(None if p is None else REPLICATED for p in made)
    return REPLICATED
