"""Finds the weights to shard along an axis, and how: the ones whose products communicate least.

Products that follow each other form a chain: columns of the first, rows of the last, and between
them every value stays a shard. Only the ends of a chain communicate.

    x R ─▶ q, k, v column ─▶ attention, by heads ─▶ out row ─▶ P      backward: all_reduce of x
                                                                      forward: all_reduce of P

Which operations keep shards is not known here: each candidate is propagated with torch's sharding
rules, and the bytes of its redistributions are counted. A chain is kept if it communicates little
inside. So products whose shards would split a head stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Shard

from piper.base.errors import CaptureError
from piper.capture.chunk.cut import body_of
from piper.capture.graphs import operations
from piper.capture.shard.local_graph import differentiable
from piper.capture.shard.placement_search import Placing
from piper.capture.shard.placements import REPLICATED, LocalLayout, ShardedSections
from piper.capture.shard.propagate import propagate
from piper.capture.shard.shard_axis import ShardAxis
from piper.capture.shard.sharding_rules import Rules
from piper.capture.shard.weights.joined_graph import Joined
from piper.capture.shard.weights.weight_shards import is_vocabulary, products_of, weight_shard
from piper.ir.collectives import COLLECTIVES, Move
from piper.ir.shards import ParameterShard, Style

aten = torch.ops.aten
_INSIDE = Fraction(5, 4)
"""The most bytes of a chain, relative to those at its ends."""
_Following = Callable[[fx.Node], Iterable[fx.Node]]
Styles = Mapping[fx.Node, Style]
"""By parameter."""


class Chains:
    """The search in one graph. ``styles`` is its result."""

    def __init__(self, joined: Joined, ways: int, whole: Collection[str]) -> None:
        self._axis = ShardAxis("tp", ways)
        self._rules = Rules(self._axis)
        self._names = {node: name for name, node in joined.parameters.items()}
        self._given = (list(joined.parameters.values()), list(joined.buffers.values()))
        self._order = {node: i for i, node in enumerate(joined.graph.nodes)}
        self._weights: dict[fx.Node, fx.Node] = {}
        """By product, its weight."""
        self._sizes: dict[fx.Node, int] = {}
        """By weight, the size of its dimension in the result."""
        self._lookups: dict[fx.Node, list[fx.Node]] = {}
        """By parameter, the embeddings that look rows up in it."""
        self._known: dict[object, Fraction] = {}
        self.styles: dict[fx.Node, Style] = {}
        for name, node in joined.parameters.items():
            if name not in whole:
                self._note_uses(node)
        self._active = self._depends(joined)
        for product, weight in self._weights.items():
            if is_vocabulary(weight):
                self._shard_head(product)
        found = [chain for product in self._weights for chain in self._chains(product)]
        for _, styles in sorted(found, key=lambda chain: chain[0]):
            if all(self.styles.get(w, how) is how for w, how in styles.items()):
                self.styles.update(styles)
        self._shard_tokens()

    def _note_uses(self, node: fx.Node) -> None:
        dims = list(range(len(node.meta["val"].shape)))
        for product, out, _ in products_of(node, dims):
            if product.target is aten.embedding.default:
                self._lookups.setdefault(node, []).append(product)
            else:
                self._weights[product] = node
                self._sizes.setdefault(node, node.meta["val"].shape[out])

    def _depends(self, joined: Joined) -> set[fx.Node]:
        """The values that depend on products or on differentiable inputs. Each part of the graph
        can compute the others again, such as masks, rotary tables and casts of parameters."""
        given = set(joined.inputs)
        active = {node for node in given if differentiable(node)}
        looked = {x for row in self._lookups.values() for x in row}
        from_batch = set(given)
        for node in operations(joined.graph):
            read = set(node.all_input_nodes)
            if not read.isdisjoint(from_batch):
                from_batch.add(node)
            rows = node in looked and node in from_batch
            if node in self._weights or rows or not read.isdisjoint(active):
                active.add(node)
        return active

    def _chains(self, last: fx.Node) -> Iterator[tuple[Fraction, Styles]]:
        """The chains that end in the product ``last``: the bytes that each sends for an element of
        its weights, and how these are sharded."""
        sources = [x for x in self._walk(self._activations(last), _reads) if x in self._weights]
        for first in self._widest(sources):
            for sinks in self._sinks(first, last):
                styles = {
                    **dict.fromkeys((self._weights[x] for x in first), Style.COLUMN),
                    **dict.fromkeys((self._weights[x] for x in sinks), Style.ROW),
                }
                apart = not any(w in self.styles or w in self._lookups for w in styles)
                nodes = self._between(first, sinks)
                if len(styles) < len(first) + len(sinks) or not apart or not nodes:
                    continue
                nodes += [x for x in sources if x not in first]  # what stays whole beside it
                cheap = self._cheap(nodes, first, styles, _INSIDE * self._ends(first, sinks))
                if cheap is not None:
                    yield cheap[0] / sum(w.meta["val"].numel() for w in styles), cheap[1]

    def _walk(self, start: Iterable[fx.Node], following: _Following) -> Iterator[fx.Node]:
        """``start`` and what follows, up to and with the next products."""
        stack, seen = list(start), set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen or node not in self._active or node.op != "call_function":
                continue
            seen.add(node)
            yield node
            if node not in self._weights:
                stack += following(node)

    def _activations(self, product: fx.Node) -> list[fx.Node]:
        return [x for x in product.all_input_nodes if x in self._active]

    def _widest(self, products: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
        """The products with the widest results, then also those with the next, up to all: keys and
        values of few heads may stay whole."""
        sizes = {x: self._sizes[self._weights[x]] for x in products}
        for least in sorted(set(sizes.values()), reverse=True):
            yield [x for x in products if sizes[x] >= least]

    def _sinks(self, first: Sequence[fx.Node], last: fx.Node) -> Iterator[list[fx.Node]]:
        """``last`` alone, and all products that read results of ``first``."""
        every = [x for x in self._reached(first) if x in self._weights]
        yield from ([last], every) if len(every) > 1 else ([last],)

    def _between(self, first: Sequence[fx.Node], sinks: Collection[fx.Node]) -> list[fx.Node]:
        """The operations from ``first`` to ``sinks``; none if a residual goes past ``first``, or
        if others read their values."""
        reached = [*first, *self._reached(first)]
        inside: set[fx.Node] = {*sinks}
        for node in sorted(reached, key=self._order.__getitem__, reverse=True):
            if node in first or (node not in self._weights and not inside.isdisjoint(node.users)):
                inside.add(node)
        before: set[fx.Node] = set()
        stack = [x for node in first for x in self._activations(node)]
        while stack:
            node = stack.pop()
            if node not in before:
                before.add(node)
                stack += self._activations(node)
        for node in inside.difference(sinks):
            past = node not in first and not before.isdisjoint(node.all_input_nodes)
            read = any(
                x not in inside and (x in self._active or x.op == "output") for x in node.users
            )
            if past or read:
                return []
        return list(inside)

    def _reached(self, first: Sequence[fx.Node]) -> Iterator[fx.Node]:
        return self._walk([user for x in first for user in x.users], _users)

    def _shard_head(self, product: fx.Node) -> None:
        """Shard the classes of logits, if they are many and are not gathered."""
        (taken,) = self._activations(product) or (product,)
        if product.meta["val"].nbytes < taken.meta["val"].nbytes:
            return
        styles, gathered = {self._weights[product]: Style.COLUMN}, self._ends([product], [product])
        nodes = [product, *self._reached([product])]
        cheap = self._cheap(nodes, [product], styles, gathered)
        self.styles.update(cheap[1] if cheap is not None else {})

    def _shard_tokens(self) -> None:
        """Shard the vocabulary of the largest embedding of the batch, unless it is tied to a head
        that is whole."""
        tokens = {w: row for w, row in self._lookups.items() if self._active.issuperset(row)}
        most = max((w.meta["val"].shape[0] for w in tokens), default=0)
        for weight, nodes in tokens.items():
            alone = weight.meta["val"].shape[0] == most and weight not in self._sizes
            if weight in self.styles or (alone and self._bytes(nodes, {weight: Style.ROW})):
                self.styles[weight] = Style.ROW

    def _cheap(
        self, nodes: Collection[fx.Node], first: Sequence[fx.Node], styles: Styles, most: Fraction
    ) -> tuple[Fraction, Styles] | None:
        """The bytes of ``styles`` with those of the biases of ``first``, and of other biases and
        tables of biases that then send less; None if these are not less than ``most``."""
        biases = {x for product in first for x in product.all_input_nodes if self._is_vector(x)}
        styles = {**styles, **dict.fromkeys(biases, Style.COLUMN)}
        cost = self._bytes(nodes, styles)
        if cost is None or cost > 2 * most:
            return None
        sizes = {self._sizes[self._weights[x]] for x in first}
        for other in self._part(nodes)[1]:
            vector = self._is_vector(other) and other.meta["val"].shape[0] in sizes
            table = self._active.isdisjoint(self._lookups.get(other, self._active))
            if other not in styles and (vector or table):
                less = self._bytes(nodes, {**styles, other: Style.COLUMN})
                if less is not None and less < cost:
                    cost, styles = less, {**styles, other: Style.COLUMN}
        return (cost, styles) if cost < most else None

    def _is_vector(self, node: fx.Node) -> bool:
        return node in self._names and len(node.meta["val"].shape) == 1

    def _bytes(self, members: Collection[fx.Node], styles: Styles) -> Fraction | None:
        """The bytes that each device sends, forward and backward, for these operations; None if
        the weights cannot be sharded so."""
        shards: dict[fx.Node, ParameterShard] = {}
        try:
            for node, how in styles.items():
                shard = weight_shard(self._names[node], node, how, self._axis.ways, "")
                if shard is not None:
                    shards[node] = shard
            return self._sent(members, shards)
        except CaptureError:
            return None

    def _sent(
        self, members: Collection[fx.Node], shards: Mapping[fx.Node, ParameterShard]
    ) -> Fraction:
        nodes, read = self._part(members)
        parameters, buffers = ([x for x in row if x in read] for row in self._given)
        inputs = [x for x in read if x not in parameters and x not in buffers]
        inside = set(nodes)
        ends = [
            x
            for x in nodes
            if isinstance(x.meta["val"], Tensor)
            and x in self._active
            and any(user not in inside for user in x.users)
        ]
        numbers = {x: i for i, x in enumerate(parameters)}
        body = body_of(nodes, numbers, buffers, inputs, ends, [])
        given = [_layout(shards.get(x)) for x in parameters]
        given += [REPLICATED] * (len(buffers) + len(inputs))
        key = body.key, tuple(map(str, given))
        if key in self._known:
            return self._known[key]
        placing = Placing(self._rules, self._axis, lambda x: REPLICATED)
        local = propagate(body, placing, given, [REPLICATED] * len(ends), [None] * len(inputs))
        sent = Fraction(0)
        for node, move in local.moves.items():
            (source,) = node.all_input_nodes
            nbytes = max(source.meta["val"].nbytes, node.meta["val"].nbytes)
            back = move.backward if differentiable(source) else Move.NOTHING
            sent += self._move(move.forward, nbytes) + self._move(back, nbytes)
        self._known[key] = sent
        return sent

    def _part(self, members: Collection[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """``members`` with what they compute for themselves, in order; the arguments they read."""
        nodes, read = dict.fromkeys(members), dict[fx.Node, None]()
        stack = [x for node in members for x in (*node.all_input_nodes, *_items(node))]
        while stack:
            node = stack.pop()
            if node in nodes or node in read:
                continue
            makers = set(node.all_input_nodes)
            item = bool(makers) and node in {i for x in makers if x in nodes for i in _items(x)}
            if node.op == "call_function" and (item or node not in self._active):
                nodes[node] = None
                stack += [*node.all_input_nodes, *_items(node)]
            else:
                read[node] = None
        order = self._order.__getitem__
        return sorted(nodes, key=order), sorted(read, key=order)

    def _move(self, move: Move, nbytes: int) -> Fraction:
        if move not in COLLECTIVES:
            return Fraction(0)
        share = Fraction(nbytes * (self._axis.ways - 1), self._axis.ways)
        return COLLECTIVES[move].algorithms[0].sent(nbytes, share)

    def _ends(self, first: Collection[fx.Node], sinks: Collection[fx.Node]) -> Fraction:
        """The bytes that a chain sends for the gradients of its inputs and for its results."""
        ends = {*(x for product in first for x in self._activations(product)), *sinks}
        return sum((self._move(Move.ALL_REDUCE, x.meta["val"].nbytes) for x in ends), Fraction(0))


def _reads(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes


def _users(node: fx.Node) -> Iterable[fx.Node]:
    return node.users


def _items(node: fx.Node) -> list[fx.Node]:
    """The items of a tuple."""
    return [] if isinstance(node.meta["val"], Tensor) else list(node.users)


def _layout(shard: ParameterShard | None) -> LocalLayout:
    if shard is None:
        return REPLICATED
    if shard.sections:
        return ShardedSections(shard.dim, shard.sections)
    return Shard(shard.dim)
