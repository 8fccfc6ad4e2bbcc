"""From a chunk's graph, and how its parameters and inputs are sharded along an axis, to the graph
of one device's share: every operation at local shapes, and a redistribution wherever a value is
read in another layout than it is made in.

    x R ─▶ linear(w S(0)) ─▶ S ─▶ linear(w S(1)) ─▶ P ─▶ [all_reduce] ─▶ R ─▶ add

Only the forward is propagated. The gradient of a value follows from its layout: S for S, R for P,
and for R a partial sum where a sharded computation reads it, else R. So every redistribution of the
forward is one of the backward too, and ``differentiate`` makes the backward of the shares.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from piper.capture.chunks import Body, Draw, Move, Redistribution
from piper.capture.fused import SPLITS, Packed, dim_of, section
from piper.capture.graphs import is_random
from piper.capture.quiet import hushed_loggers
from piper.capture.resizing import resized
from piper.capture.sharding_rewrites import rewritten
from piper.capture.sharding_rules import REPLICATED, Placement, Placements, Rules
from piper.capture.vocabulary import on_shards, wanted_target
from piper.errors import CaptureError

aten = torch.ops.aten
SUM = Partial()
_PASS_PARTIAL = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.alias.default,
}
"""What a partial sum may pass before it is reduced: it is reduced once, where it is made."""
_ADD = {aten.add.Tensor, aten.sub.Tensor}
_TRIED = 512
"""Ways to read the inputs of an operation, before they are all gathered."""


Given = Placement | Packed


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
    """What depends on no parameter and no input."""
    placements: tuple[Placement, ...]
    """Of the results."""
    rank: fx.Node | None
    """The device's place along the axis, if it is needed."""
    draws: tuple[tuple[fx.Node, Draw | None], ...]
    """What draws random numbers, in the order of the whole; None for what is no dropout."""


def propagate(
    body: Body,
    rules: Rules,
    ways: int,
    given: Sequence[Given],
    wanted: Sequence[Placement | None],
    resolved: Callable[[Tensor], Placement],
    split: Sequence[int | None],
    name: str,
) -> Local:
    """The share of ``body`` on each of ``ways`` devices. ``given`` are the placements of its
    arguments, ``wanted`` those of its results where they are not open, ``resolved`` what becomes of
    a partial sum; ``split`` are dimensions along which inputs are sharded that all devices have
    whole; ``name`` is for errors."""
    found = _Propagation(body, rules, ways, given, resolved, name)
    found.split(split)
    for node in found.nodes():
        found.visit(node)
    return found.finished(wanted)


class _MisfitError(Exception):
    """An operation names sizes, or the like, that are those of the whole."""


class _Propagation:
    def __init__(
        self,
        body: Body,
        rules: Rules,
        ways: int,
        given: Sequence[Given],
        resolved: Callable[[Tensor], Placement],
        name: str,
    ) -> None:
        self._body, self._rules, self._ways = body, rules, ways
        self._resolved, self._name = resolved, name
        self._mode = body.fakes()[0].fake_mode
        self._device = body.fakes()[0].device
        self._rank: fx.Node | None = None
        self._draws: list[tuple[fx.Node, Draw | None]] = []
        self._graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        """How each node of the body is placed."""
        self._local: dict[fx.Node, fx.Node] = {}
        self._whole: dict[fx.Node, Any] = {}
        """Fake tensors of the whole, by node of the body."""
        self._forms: dict[tuple[fx.Node, Placement, bool], fx.Node] = {}
        self._sharded: set[fx.Node] = set()
        self._moves: dict[fx.Node, Redistribution] = {}
        self._constants: set[fx.Node] = set()
        self._fixed: set[fx.Node] = set()
        """Parameters and buffers."""
        self._derived: set[fx.Node] = set()
        """What is computed of parameters alone: those who compute on shards do it again, so that
        its gradient is summed with that of the parameters, once a step."""
        self._source = rewritten(body.module.graph, given, ways)
        placeholders = self._source.find_nodes(op="placeholder")
        for number, (node, placement) in enumerate(zip(placeholders, given, strict=True)):
            fake = node.meta["val"]
            self._made[node], self._whole[node] = placement, fake
            local = self._graph.placeholder(node.target)
            local.meta["val"] = self._empty(fake, placement)
            self._local[node] = local
            if number < body.parameters + body.buffers:
                self._fixed.add(node)
            if body.parameters <= number < body.parameters + body.buffers:
                self._constants.add(local)
        self._arguments = tuple(self._local[node] for node in placeholders)

    def split(self, dims: Sequence[int | None]) -> None:
        """Take this device's part of inputs that all devices have whole, along ``dims``."""
        first = self._body.parameters + self._body.buffers
        placeholders = self._source.find_nodes(op="placeholder")[first:]
        for node, dim in zip(placeholders, dims, strict=True):
            if dim is not None:
                self._local[node] = self._slice(self._local[node], dim)
                self._made[node] = Shard(dim)

    def nodes(self) -> list[fx.Node]:
        return [node for node in self._source.nodes if node.op == "call_function"]

    def visit(self, node: fx.Node) -> None:
        self._whole[node] = node.meta["val"]
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            made = self._made[source]
            self._made[node] = made[index] if isinstance(made, tuple) else made  # type: ignore[index]
            sharded = self._local[source] in self._sharded
            self._emit(node, operator.getitem, (self._local[source], index), {}, sharded)
            return
        if self._rewrite(node):
            return
        needs, made = self._placed(node)
        if made == REPLICATED and self._is_derived(node):
            self._derived.add(node)
        try:
            self._compute(node, needs, made)
        except _MisfitError:
            whole = _like(self._whole[node], REPLICATED)
            self._compute(node, dict.fromkeys(needs, REPLICATED), whole)

    def _compute(self, node: fx.Node, needs: dict[fx.Node, Any], made: Any) -> None:
        sharded = made != _replicated(made) or any(p != REPLICATED for p in needs.values())
        if is_random(node) and sharded:
            if self._dropped_out(node, needs, made):
                return
            raise CaptureError(
                f"region {self._name} draws random numbers in {node.target} on a shard of a value: "
                "set dropout to 0 there"
            )
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda x: self._form(x, needs.get(x), sharded), (node.args, dict(node.kwargs))
        )
        self._made[node] = made
        if sharded and isinstance(made, Shard | Packed):
            shape = self._shape(self._whole[node], made)
            self._emit(node, *resized(node.target, args, kwargs, shape), sharded)
        elif made == Partial("avg"):
            local = self._emit(node, node.target, args, kwargs, sharded)
            self._made[node] = SUM
            self._local[node] = self._call(aten.div.Scalar, (local, self._ways), sharded=True)
        else:
            self._emit(node, node.target, args, kwargs, sharded)

    def _dropped_out(self, node: fx.Node, needs: dict[fx.Node, Any], made: Any) -> bool:
        """A dropout on a shard: this device's part of what the whole would have drawn."""
        if node.target is not aten.dropout.default or not isinstance(made, Shard):
            return False
        whole = self._whole[node]
        (source,) = node.all_input_nodes
        kwargs = {"dtype": whole.dtype, "device": self._device}
        ones = self._graph.call_function(aten.ones.default, (list(whole.shape),), kwargs)
        self._constants.add(self._noted(ones, True))
        noise = self._call(aten.dropout.default, (ones, *node.args[1:]), True)
        self._drawn(node, noise)
        part = self._slice(noise, made.dim)
        self._made[node] = made
        read = self._form(source, needs[source], True)
        self._local[node] = self._call(aten.mul.Tensor, (read, part), True)
        return True

    def _drawn(self, node: fx.Node, local: fx.Node) -> None:
        draw = None
        if node.target is aten.dropout.default:
            whole, probability = self._whole[node], node.args[1]
            assert isinstance(probability, float)
            draw = Draw(tuple(whole.shape), whole.dtype, probability)
        self._draws.append((local, draw))

    def _rewrite(self, node: fx.Node) -> bool:
        """Compute ``node`` otherwise than the whole does, where shards must."""
        placed = {
            x: self._resolved(self._whole[x]) if isinstance(p, Partial) else p
            for x, p in ((x, self._made[x]) for x in node.all_input_nodes)
        }
        placed |= wanted_target(node, placed)
        local = _Read(self, placed)
        found = on_shards(node, placed, local, self)
        if found is None:
            return False
        self._local[node], self._made[node] = found.local, found.placement
        return True

    def call(self, target: Any, *args: Any, sharded: bool = True) -> fx.Node:
        return self._call(target, args, sharded)

    def rank(self) -> fx.Node:
        if self._rank is None:
            with self._graph.inserting_after(self._arguments[-1]):
                self._rank = self._graph.placeholder("rank")
            with self._mode:
                self._rank.meta["val"] = torch.empty((), dtype=torch.int64, device=self._device)
            self._constants.add(self._rank)
        return self._rank

    def moved(
        self, local: fx.Node, made: Placement, wanted: Placement, *, sharded: bool
    ) -> fx.Node:
        return self._redistributed(local, local, made, wanted, True, sharded)

    def finished(self, wanted: Sequence[Placement | None]) -> Local:
        ends = pytree.tree_leaves(self._source.output_node().args[0])
        placements = [
            self._natural(node) if placement is None else placement
            for node, placement in zip(ends, wanted, strict=True)
        ]
        results = [
            self._form(node, placement, placement != REPLICATED)
            for node, placement in zip(ends, placements, strict=True)
        ]
        self._graph.output(tuple(results))
        self._graph.eliminate_dead_code()
        left = set(self._graph.nodes)
        return Local(
            self._graph,
            self._arguments,
            tuple(results),
            frozenset(self._sharded & left),
            {node: move for node, move in self._moves.items() if node in left},
            frozenset(self._constants & left),
            tuple(placements),
            self._rank,
            tuple(self._draws),
        )

    def _natural(self, node: fx.Node) -> Placement:
        """How a result is placed if its readers leave it open: as it is made, or a sum of it."""
        made = self._made[node]
        if isinstance(made, Partial):
            return self._resolved(self._whole[node])
        return made if isinstance(made, Shard) else REPLICATED

    def _placed(self, node: fx.Node) -> tuple[dict[fx.Node, Any], Any]:
        """How an operation reads its inputs, and how what it makes is placed."""
        now = {x: self._made[x] for x in node.all_input_nodes}
        if all(p == REPLICATED for p in now.values()):
            return now, _like(self._whole[node], REPLICATED)
        if any(isinstance(p, Packed) for p in now.values()):
            apart = {x: p if isinstance(p, Packed) else REPLICATED for x, p in now.items()}
            found = self._packed(node, apart)
            if found is not None:
                return apart, found
            now = {x: REPLICATED if isinstance(p, Packed) else p for x, p in now.items()}
        partial = [x for x, p in now.items() if isinstance(p, Partial)]
        passes = not any(self._is_resolved(x) for x in partial) and (
            node.target in _PASS_PARTIAL
            or (node.target in _ADD and len(partial) == len(now) and not node.kwargs)
        )
        if partial and not passes:
            for x in partial:
                now[x] = self._resolved(self._whole[x])
        made = self._ask(node, now)
        if made is not None:
            return now, made
        return self._search(node, now)

    def _is_resolved(self, node: fx.Node) -> bool:
        """Whether a partial sum was reduced already, for another reader."""
        placement = self._resolved(self._whole[node])
        return any((node, placement, sharded) in self._forms for sharded in (True, False))

    def _is_derived(self, node: fx.Node) -> bool:
        inputs = node.all_input_nodes
        known = all(x in self._fixed or x in self._derived for x in inputs)
        return bool(inputs) and known and not is_random(node)

    def _search(
        self, node: fx.Node, now: dict[fx.Node, Any]
    ) -> tuple[dict[fx.Node, Any], Placements]:
        """The cheapest way to read the inputs for which there is a rule; of equals, that which
        shards most."""
        choices = [self._choices(x, placement) for x, placement in now.items()]
        tried = sorted(itertools.product(*choices), key=lambda row: self._costs(now, row))
        for row in tried[:_TRIED]:
            needs = dict(zip(now, row, strict=True))
            made = self._ask(node, needs)
            if made is not None:
                return needs, made
        return dict.fromkeys(now, REPLICATED), _like(self._whole[node], REPLICATED)

    def _choices(self, x: fx.Node, now: Placement) -> list[Placement]:
        whole = self._whole[x]
        fixed = x in self._fixed and (now != REPLICATED or len(whole.shape) > 1)
        if fixed or not isinstance(whole, Tensor):
            return [now]
        dims = [d for d, n in enumerate(whole.shape) if n % self._ways == 0 and n > 1]
        return list(dict.fromkeys([now, REPLICATED, *map(Shard, dims)]))

    def _costs(self, now: dict[fx.Node, Any], row: Sequence[Placement]) -> tuple[int, int]:
        total = sum(self._cost(x, p) for x, p in zip(now, row, strict=True))
        return total, sum(p == REPLICATED for p in row)

    def _cost(self, x: fx.Node, placement: Placement) -> int:
        """Bytes that reading a value so communicates, in both directions."""
        made, whole = self._made[x], self._whole[x]
        if isinstance(made, Partial):
            made = self._resolved(whole)
        if made == placement or not isinstance(whole, Tensor):
            return 0
        nbytes = int(whole.numel() * whole.dtype.itemsize)
        if isinstance(made, Shard) and isinstance(placement, Shard):
            return 2 * nbytes // self._ways
        return nbytes + (nbytes if made != REPLICATED else 0)

    def _ask(self, node: fx.Node, needs: dict[fx.Node, Any]) -> Any:
        if all(p == REPLICATED for p in needs.values()):
            return _like(self._whole[node], REPLICATED)
        for x, placement in needs.items():
            if isinstance(placement, Shard) and isinstance(self._whole[x], Tensor):
                shape = self._whole[x].shape
                if placement.dim >= len(shape) or shape[placement.dim] % self._ways:
                    return None
        given = {id(self._whole[x]): p for x, p in needs.items() if isinstance(p, Placement)}
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda x: self._whole[x], (node.args, dict(node.kwargs))
        )
        made = self._rules.ask(node.target, args, kwargs, given)  # type: ignore[arg-type]
        if made is None or not self._fits(self._whole[node], made):
            return None
        return made

    def _fits(self, whole: Any, made: Any) -> bool:
        """Whether shards placed so are even, and partial sums are sums."""
        if isinstance(made, tuple):
            pairs = zip(whole, made, strict=True)
            return all(p is None or (self._fits(x, p) and p != Partial("avg")) for x, p in pairs)
        if isinstance(made, Shard):
            return type(made) is Shard and whole.shape[made.dim] % self._ways == 0
        return made in (REPLICATED, SUM, Partial("avg"))

    def _packed(self, node: fx.Node, now: dict[fx.Node, Any]) -> Any:
        """The placement of what is made of a fused weight's sections, up to where they part; None
        where they cannot stay packed."""
        first = next(p for p in now.values() if isinstance(p, Packed))
        whole = self._whole[node]
        if node.target in SPLITS and dim_of(node, 2) == first.dim:
            sizes = tuple(int(x.shape[first.dim]) for x in whole)
            return (Shard(first.dim),) * len(sizes) if sizes == first.sections else None
        if node.target is aten.slice.Tensor and dim_of(node, 1) == first.dim:
            return Shard(first.dim) if section(node, first) is not None else None
        if any(isinstance(p, Packed) and p.sections != first.sections for p in now.values()):
            return None
        made = self._ask(node, {x: _plain(p) for x, p in now.items()})
        if not isinstance(made, Shard):
            return None
        return first.on(made.dim, whole.shape[made.dim], self._ways)

    def _form(self, node: fx.Node, placement: Any, sharded: bool) -> fx.Node:
        """``node`` at local shapes as one reader needs it, who computes on shards or not."""
        made, local = self._made[node], self._local[node]
        if placement is None or isinstance(made, tuple):
            return local
        made_sharded = made != REPLICATED or local in self._sharded
        plain = node in self._fixed or local in self._constants or not _differentiable(local)
        if made == placement and (made != REPLICATED or made_sharded == sharded or plain):
            return local
        if made == REPLICATED == placement and made_sharded:
            return local  # what shards make that is the same everywhere has no gradient
        key = node, placement, sharded
        if key not in self._forms:
            if made == REPLICATED == placement and node in self._derived:
                self._forms[key] = self._again(node)
            else:
                self._forms[key] = self._redistributed(
                    node, local, made, placement, made_sharded, sharded
                )
        return self._forms[key]

    def _again(self, node: fx.Node) -> fx.Node:
        """What is computed of parameters, for those who compute on shards."""
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda x: self._form(x, REPLICATED, True), (node.args, dict(node.kwargs))
        )
        return self._noted(self._graph.call_function(node.target, args, kwargs), True)  # type: ignore[arg-type]

    def _redistributed(
        self,
        node: fx.Node,
        local: fx.Node,
        made: Given,
        wanted: Placement,
        before: bool,
        after: bool,
    ) -> fx.Node:
        fixed = local in self._constants or not _differentiable(local)
        if made == REPLICATED and not before and after and isinstance(wanted, Shard) and fixed:
            return self._slice(local, wanted.dim)
        if node in self._fixed:  # what is moved is a value
            local = self._call(aten.clone.default, (local,), before)
        packed = local
        if isinstance(wanted, Shard):
            packed = self._pack(local, wanted.dim, before)
        moves = _MOVES[type(_plain(made)), type(wanted), after]
        args: Any = (packed, moves[0], self._ways)
        moved = self._graph.call_function(_moved, args)
        moved.meta["val"] = self._on_fakes(_moved, args, {})
        self._moves[moved] = Redistribution(*moves, f"{made} -> {wanted}")
        if isinstance(made, Packed):
            return self._unpack_sections(moved, made, after)
        if isinstance(made, Shard):
            return self._unpack(moved, made.dim, after)
        return moved

    def _slice(self, x: fx.Node, dim: int) -> fx.Node:
        """This device's part of what is the same everywhere and has no gradient."""
        size = x.meta["val"].shape[dim] // self._ways
        own = self._graph.call_function(aten.arange.default, (size,), {"device": self._device})
        own = self._noted(own, True)
        first = self._call(aten.mul.Tensor, (self.rank(), size), True)
        at = self._call(aten.add.Tensor, (own, first), True)
        part = self._call(aten.index_select.default, (x, dim, at), True)
        self._constants |= {own, first, at}
        if x in self._constants:
            self._constants.add(part)
        return part

    def _unpack_sections(self, x: fx.Node, packed: Packed, sharded: bool) -> fx.Node:
        """The sections of a fused weight's result, each with the parts of all devices."""
        sizes = [n // self._ways for n in packed.sections]
        parts = self._call(aten.split_with_sizes.default, (x, sizes, packed.dim + 1), sharded)
        whole = [
            self._unpack(self._call(operator.getitem, (parts, i), sharded), packed.dim, sharded)
            for i in range(len(sizes))
        ]
        return self._call(aten.cat.default, (whole, packed.dim), sharded)

    def _pack(self, x: fx.Node, dim: int, sharded: bool) -> fx.Node:
        """``x`` with its parts along ``dim`` in a first dimension."""
        shape = list(x.meta["val"].shape)
        cut = [*shape[:dim], self._ways, shape[dim] // self._ways, *shape[dim + 1 :]]
        parts = self._call(aten.reshape.default, (x, cut), sharded)
        order = [dim, *(i for i in range(len(cut)) if i != dim)]
        moved = self._call(aten.permute.default, (parts, order), sharded)
        packed = self._graph.call_function(
            aten.clone.default, (moved,), {"memory_format": torch.contiguous_format}
        )
        return self._noted(packed, sharded)

    def _unpack(self, x: fx.Node, dim: int, sharded: bool) -> fx.Node:
        """The other way round."""
        shape = list(x.meta["val"].shape)
        rest = list(range(1, len(shape)))
        moved = self._call(aten.permute.default, (x, [*rest[:dim], 0, *rest[dim:]]), sharded)
        sizes = shape[1:]
        sizes[dim] *= self._ways
        return self._call(aten.reshape.default, (moved, sizes), sharded)

    def _emit(self, node: fx.Node, target: Any, args: Any, kwargs: Any, sharded: bool) -> fx.Node:
        taken = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.Node)]
        for x in node.all_input_nodes:
            if isinstance(self._made[x], Packed) and self._local[x] in taken:
                target, args, kwargs = self._parting(node, self._made[x], target, args, kwargs)
        local = self._graph.call_function(target, tuple(args), dict(kwargs))
        try:
            self._noted(local, sharded)
        except (RuntimeError, ValueError, IndexError) as error:
            raise _MisfitError from error
        self._check(node, local)
        self._local[node] = local
        if all(x in self._constants for x in taken) and not is_random(node):
            self._constants.add(local)
        if is_random(node):
            self._drawn(node, local)
        local.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        return local

    def _parting(self, node: fx.Node, packed: Packed, target: Any, args: Any, kwargs: Any) -> Any:
        """Where the sections of a fused weight part: their sizes on a shard."""
        local = [n // self._ways for n in packed.sections]
        if target in SPLITS and dim_of(node, 2) == packed.dim:
            return aten.split_with_sizes.default, (args[0], local, packed.dim), {}
        if target is aten.slice.Tensor and dim_of(node, 1) == packed.dim:
            which = section(node, packed)
            assert which is not None
            start = sum(local[:which])
            return target, (args[0], packed.dim, start, start + local[which]), {}
        return target, args, kwargs

    def _check(self, node: fx.Node, local: fx.Node) -> None:
        """What is made on a shard must have its shape."""
        made = self._made[node]
        values = local.meta["val"]
        pairs = zip(values, made, strict=True) if isinstance(made, tuple) else [(values, made)]
        wholes = self._whole[node] if isinstance(made, tuple) else [self._whole[node]]
        for whole, (value, placement) in zip(wholes, pairs, strict=True):
            if not isinstance(value, Tensor) or placement is None:
                continue
            if tuple(value.shape) != self._shape(whole, placement):
                raise _MisfitError

    def _call(self, target: Any, args: tuple[Any, ...], sharded: bool) -> fx.Node:
        return self._noted(self._graph.call_function(target, args), sharded)

    def _noted(self, local: fx.Node, sharded: bool) -> fx.Node:
        local.meta["val"] = self._on_fakes(local.target, local.args, local.kwargs)
        if sharded:
            self._sharded.add(local)
        return local

    def _on_fakes(self, target: Any, args: Any, kwargs: Any) -> Any:
        fakes = pytree.tree_map_only(fx.Node, lambda x: x.meta["val"], (args, dict(kwargs)))
        with self._mode, torch.no_grad(), hushed_loggers():
            return target(*fakes[0], **fakes[1])

    def _shape(self, whole: Tensor, placement: Given) -> tuple[int, ...]:
        shape = list(whole.shape)
        if isinstance(placement, Shard | Packed):
            shape[placement.dim] //= self._ways
        return tuple(shape)

    def _empty(self, fake: FakeTensor, placement: Given) -> Tensor:
        shape = self._shape(fake, placement)
        with self._mode:
            if shape == tuple(fake.shape):
                return torch.empty_strided(
                    shape, fake.stride(), dtype=fake.dtype, device=fake.device
                )
            return torch.empty(shape, dtype=fake.dtype, device=fake.device)


class _Read(Mapping[fx.Node, fx.Node]):
    """Local values as a rewrite reads them."""

    def __init__(self, of: _Propagation, placed: Mapping[fx.Node, Any]) -> None:
        self._of, self._placed = of, placed

    def __getitem__(self, node: fx.Node) -> fx.Node:
        return self._of._form(node, self._placed[node], True)

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._placed)

    def __len__(self) -> int:
        return len(self._placed)


_MOVES = {
    (Replicate, Replicate, True): (Move.NOTHING, Move.ALL_REDUCE),
    (Replicate, Shard, True): (Move.SELECT, Move.ALL_GATHER),
    (Partial, Replicate, False): (Move.ALL_REDUCE, Move.NOTHING),
    (Partial, Replicate, True): (Move.ALL_REDUCE, Move.ALL_REDUCE),
    (Partial, Shard, True): (Move.REDUCE_SCATTER, Move.ALL_GATHER),
    (Shard, Replicate, False): (Move.ALL_GATHER, Move.SELECT),
    (Shard, Replicate, True): (Move.ALL_GATHER, Move.REDUCE_SCATTER),
    (Shard, Shard, True): (Move.ALL_TO_ALL, Move.ALL_TO_ALL),
}
"""By the layout in which a value is made, that in which it is read, and whether the reader computes
on shards: what the forward does, and what the backward does with its gradient."""


def _moved(x: Tensor, move: Move, ways: int) -> Tensor:
    """A tensor of the shape that a move makes; its contents come from elsewhere."""
    if move is Move.ALL_GATHER:
        return x.unsqueeze(0).expand(ways, *x.shape).clone()
    if move in (Move.REDUCE_SCATTER, Move.SELECT):
        return x.select(0, 0).clone()
    return x.clone(memory_format=torch.contiguous_format)


def stand_in(move: Move, ways: int) -> Callable[[Tensor], Tensor]:
    """What a redistribution looks like to autograd: a function of the same shapes."""
    return lambda x: _moved(x, move, ways)


def _plain(placement: Given) -> Placement:
    return Shard(placement.dim) if isinstance(placement, Packed) else placement


def _differentiable(local: fx.Node) -> bool:
    value = local.meta["val"]
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _replicated(made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(None if p is None else REPLICATED for p in made)
    return REPLICATED


def _like(whole: Any, placement: Placement) -> Any:
    if isinstance(whole, list | tuple):
        return tuple(placement if isinstance(x, Tensor) else None for x in whole)
    return placement
