"""Cuts one device's share of a chunk into segments: computations, and the redistributions between
them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, fx

from piper.base.errors import CaptureError
from piper.capture.chunk.chunks import Body, Chunk
from piper.capture.chunk.cut import body_of, read_by, recomputed_for
from piper.capture.shard.propagate import Local
from piper.ir.shards import RANK, ContextAttention, Draws, ParameterShard, Segment


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one chunk is sharded along an axis."""

    axis: str
    ways: int
    stride: int
    """The distance between neighbours along the axis, in mesh positions."""
    parameters: Mapping[str, ParameterShard]
    sequence: int | None = None
    """Sequence parallelism: the dimension along which partial sums are scattered, not
    replicated."""
    split: int | None = None
    """Context parallelism: the dimension along which the tensors of the batch are sharded."""
    context: ContextAttention | None = None
    """How attention is computed under context parallelism."""
    routed: bool = False
    """For experts on sorted rows, which are not sharded along the axis: whether each device's rows
    come to them in an order of their own."""


@dataclass(frozen=True, slots=True)
class LocalChunk:
    """A segment whose values are not numbered yet."""

    segment: Segment
    body: Body | None
    """None for a redistribution."""
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    updates: tuple[str, ...]
    draws: Draws | None

    def name(self, output: fx.Node) -> str:
        """A redistributed value has the name of its source with a prime."""
        return output.name if self.body is not None else f"{output.args[0]}'"


class LocalChunks:
    """The segments of one chunk, in order."""

    def __init__(self, chunk: Chunk, sharding: Sharding, local: Local) -> None:
        self._chunk, self._sharding, self._share = chunk, sharding, local
        body = chunk.body
        first = body.parameters + body.buffers
        self._parameters = dict(
            zip(local.arguments[: body.parameters], chunk.parameters, strict=True)
        )
        self._buffers = dict(
            zip(local.arguments[body.parameters : first], chunk.buffers, strict=True)
        )
        if local.rank is not None:
            self._buffers[local.rank] = RANK + sharding.axis
        self.inputs = local.arguments[first:]
        """The inputs of the whole chunk."""
        self._updates = dict(zip(local.results[body.outputs :], chunk.updates, strict=True))
        self._ends = set(local.results)
        self._count = 0
        self._order = {node: i for i, node in enumerate(local.graph.nodes)}

    def __iter__(self) -> Iterator[LocalChunk]:
        rows: defaultdict[int, list[fx.Node]] = defaultdict(list)
        moves: defaultdict[int, list[fx.Node]] = defaultdict(list)
        for node, level in _levels(self._share).items():
            (moves if node in self._share.moves else rows)[level].append(node)
        for level in sorted({*rows, *moves}):
            if rows[level]:
                yield self._compute(rows[level], sharded=level % 2 == 1)
            for node in moves[level]:
                yield self._move(node)

    def _compute(self, nodes: list[fx.Node], *, sharded: bool) -> LocalChunk:
        """A segment of operations."""
        again = recomputed_for(nodes, self._share.constants, self._share.recomputed_by)
        inside = {*nodes, *again}
        ordered = sorted(inside, key=self._order.__getitem__)
        taken = read_by(ordered)
        parameters = [n for n in taken if n in self._parameters]
        buffers = [n for n in taken if n in self._buffers]
        inputs = [n for n in taken if n not in self._parameters and n not in self._buffers]
        updates = {self._updates[n]: n for n in ordered if n in self._updates}
        outputs = [n for n in nodes if self._leaves(n, inside)]
        names = [self._parameters[n] for n in parameters]
        shards = self._sharding.parameters
        return LocalChunk(
            segment=self._segment(sharded=sharded, names=[n for n in names if n in shards]),
            body=body_of(
                ordered,
                {node: i for i, node in enumerate(parameters)},
                buffers,
                inputs,
                outputs,
                list(updates.values()),
            ),
            parameters=tuple(names),
            buffers=tuple(self._buffers[n] for n in buffers),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            updates=tuple(updates),
            draws=self._draws(ordered),
        )

    def _move(self, node: fx.Node) -> LocalChunk:
        """A redistribution."""
        segment = replace(
            self._segment(sharded=False, names=[]), redistribution=self._share.moves[node]
        )
        (source,) = node.all_input_nodes
        return LocalChunk(segment, None, (), (), (source,), (node,), (), None)

    def _segment(self, *, sharded: bool, names: list[str]) -> Segment:
        it = self._sharding
        number, self._count = self._count, self._count + 1
        return Segment(number, it.axis, it.ways, sharded, {n: it.parameters[n] for n in names})

    def _draws(self, nodes: list[fx.Node]) -> Draws | None:
        """The position of the segment with ``nodes`` in the random draws of the chunk."""
        drawn = self._share.draws
        mine = [i for i, (node, _) in enumerate(drawn) if node in set(nodes)]
        if not mine:
            return None
        before = [draw for _, draw in drawn[: mine[0]]]
        if mine != list(range(mine[0], mine[-1] + 1)) or None in before:
            raise CaptureError(
                f"region {self._chunk.name} draws random numbers that shards cannot reproduce: "
                "only dropout can be sharded; set it to 0 there, or make the regions smaller"
            )
        earlier = self._chunk.draws or Draws(self._chunk.index)
        return Draws(earlier.chunk, (*earlier.before, *(d for d in before if d is not None)))

    def _leaves(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        if not isinstance(node.meta["val"], Tensor):
            return False
        if node in self._ends and node not in self._updates:
            return True
        return any(user not in inside and user.op != "output" for user in node.users)


def _levels(local: Local) -> dict[fx.Node, int]:
    """The level of each operation, which grows with each redistribution before it: even where all
    devices compute the same, odd where they compute on shards. An operation that reads only
    constants has the level of its first reader."""
    levels: dict[fx.Node, int] = {}
    ends = set(local.results)
    free: dict[fx.Node, None] = {}
    """Operations that read only constants, such as the noise of a dropout."""
    for node in local.graph.nodes:
        if node.op != "call_function" or (node in local.constants and node not in ends):
            continue
        before = [
            levels.get(a, 0) + (a in local.moves and node not in local.moves)
            for a in node.all_input_nodes
        ]
        level = max(before, default=0)
        if node not in local.moves and level % 2 != (node in local.sharded):
            level += 1
        levels[node] = level
        read = node.all_input_nodes
        alone = all(a in local.constants or a in free for a in read)
        if alone and node not in ends and node not in local.moves:
            free[node] = None
    for node in reversed(free):
        levels[node] = min(levels[user] for user in node.users)
    return levels
