"""Replaces the redistributions inside regions by collectives on the rule's stream, by a selection
of the device's own part, or by nothing.

    F attention ─v─▶ F [P -> R] ─v'─▶ F add         F attention ─v─▶ all_reduce ─v'─▶ F add
    B add ─g'─▶ B [P -> R] ─g─▶ B attention         B add ─g'─▶ B attention

A region that recomputes everything does not keep gathered values for its backward; it gathers them
again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from msgspec import structs

from piper.ir.collectives import ENDS, Move, Replicated
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.edges import Edges
from piper.ir.dag.values import Content, Extra
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.mesh import Mesh
from piper.ir.ops import Collective, Compute, Group, Op, Select
from piper.ir.passes import Pass, RematPolicy
from piper.ir.rules import TensorRule


def add_redistributions(dag: Dag) -> Dag:
    """``dag`` without passes that are redistributions. Every gradient must be one value."""
    if not dag.tensor:
        return dag
    ops = _Ops()
    same: dict[int, int] = {}
    """Values that equal another value, and that value."""
    gone: set[int] = set()
    """Removed nodes that do nothing."""
    nodes = dict(enumerate(dag.nodes))
    moving: dict[int, tuple[Move, Move, TensorRule]] = {}
    """By chunk, what its passes move, forwards and backwards."""
    for chunk in dag.model.chunks:
        if (segment := chunk.moving) is not None:
            moves = segment.redistribution
            assert moves is not None
            rule = dag.rule(chunk.index, segment.axis)
            moving[chunk.index] = moves.forward, moves.backward, rule
    chunks = dag.operations.chunks
    there = np.flatnonzero(np.isin(chunks, [*moving]))
    for number, of in zip(there.tolist(), chunks[there].tolist(), strict=True):
        node = dag.nodes[number]
        forward, backward, rule = moving[of]
        move = forward if node.compute.which is Pass.F else backward
        if move is Move.NOTHING:
            (read,), (made,) = node.reads, node.writes
            same[made] = read
            gone.add(number)
            del nodes[number]
        else:
            op = ops.of(move, node.mesh, rule.axis)
            stream = node.stream if move is Move.SELECT else rule.stream
            nodes[number] = structs.replace(node, op=op, stream=stream, made_by=rule.made_by)
    extra = _gather_again(dag, nodes)
    return replace(_renumbered(dag, nodes, same, gone), extra=(*dag.extra, *extra))


def _gather_again(dag: Dag, nodes: dict[int, Node]) -> list[Extra]:
    """Make backwards that recompute everything gather their inputs again, once their gradients are
    ready: the device holds the shard, not the whole value. Returns the added values."""
    extra: list[Extra] = []
    if all(dag.policy(chunk.index) is not RematPolicy.ALL for chunk in dag.model.chunks):
        return extra
    again: dict[tuple[int, int], int] = {}
    """By value and reading chunk, the value gathered again."""
    passes = [(n, node) for n, node in nodes.items() if isinstance(node.op, Compute)]
    for number, node in sorted(passes, key=lambda row: row[1].compute.which is Pass.BW):
        op = node.compute
        if op.which is Pass.F or dag.policy(op.chunk) is not RematPolicy.ALL:
            continue
        reads = list(node.reads)
        for place, value in enumerate(reads):
            maker = dag.maker(value)
            if maker is None or not _is_forward(dag.nodes[maker]) or not _gathers(nodes.get(maker)):
                continue
            gather = nodes[maker]
            if (value, op.chunk) not in again:
                again[value, op.chunk] = made = dag.first_extra + len(dag.extra) + len(extra)
                extra.append(Extra(Content.VALUE, value, Replicated(), node.parts))
                before = tuple(n for n in dag.predecessors(number) if not _is_forward(dag.nodes[n]))
                nodes[len(dag.nodes) + len(extra)] = structs.replace(
                    gather,
                    writes=(made,),
                    tags=node.tags,
                    after=before,
                    after_by=(gather.made_by,) * len(before),
                )
            reads[place] = again[value, op.chunk]
        nodes[number] = structs.replace(node, reads=tuple(reads))
    return extra


def _gathers(node: Node | None) -> bool:
    op = None if node is None else node.op
    return isinstance(op, Collective) and op.kind is Move.ALL_GATHER


def _is_forward(node: Node) -> bool:
    return isinstance(node.op, Compute) and node.op.which is Pass.F


class _Ops:
    """The operation of each redistribution: one object for equal ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[Move, int, str], Op] = {}
        self._groups: dict[tuple[int, str], tuple[Group, ...]] = {}
        self._meshes: EqualNumbers[Mesh] = EqualNumbers()

    def of(self, move: Move, mesh: Mesh | None, axis: str) -> Op:
        assert mesh is not None
        number = self._meshes.of(mesh)  # the same devices may form several meshes
        key = move, number, axis
        if key not in self._known:
            groups = self._groups.setdefault((number, axis), mesh.groups(axis))
            self._known[key] = (
                Select(groups) if move is Move.SELECT else Collective(*ENDS[move], groups)
            )
        return self._known[key]


def _renumbered(dag: Dag, nodes: dict[int, Node], same: dict[int, int], gone: set[int]) -> Dag:
    """``dag`` with only ``nodes``. They read the originals of values in ``same``."""

    def value(number: int) -> int:
        while number in same:
            number = same[number]
        return number

    def before(number: int) -> list[int]:
        if number in gone:
            return [p for other in dag.predecessors(number) for p in before(other)]
        return [int(moved[number])]

    numbers, kept = np.array([*nodes], np.int64), [*nodes.values()]
    edges, moved = Edges(kept), np.full(1 + max(*nodes, *gone), -1)
    moved[numbers] = np.arange(len(kept))
    values = np.arange(1 + max(edges.reads.items.max(initial=0), *same, 0))
    values[[*same]] = [*map(value, same)]
    reads = edges.reads.with_items(values[edges.reads.items]).tuples()
    afters = edges.after.with_items(moved[edges.after.items])
    several = numbers >= len(dag.nodes)  # added nodes may wait for one node several times
    several[afters.row_of[afters.items < 0]] = True  # so may those that wait for removed nodes
    rows = zip(kept, reads, afters.tuples(), several.tolist(), strict=True)
    for number, (node, read, after, often) in enumerate(rows):
        by = node.after_by
        if often:
            pairs = zip(node.after, node.after_by, strict=True)
            whole = {p: entry for n, entry in pairs for p in before(n)}
            after, by = tuple(whole), tuple(whole.values())
        if read != node.reads or after != node.after:
            kept[number] = structs.replace(node, reads=read, after=after, after_by=by)
    return replace(dag, nodes=tuple(kept))
