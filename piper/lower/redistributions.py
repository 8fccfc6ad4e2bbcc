"""Redistributions inside regions become what they are: collectives on the rule's stream, a
selection of one's own part, or nothing.

    F attention ─v─▶ F [P -> R] ─v'─▶ F add         F attention ─v─▶ all_reduce ─v'─▶ F add
    B add ─g'─▶ B [P -> R] ─g─▶ B attention         B add ─g'─▶ B attention
"""

from __future__ import annotations

from dataclasses import replace

from piper.capture.chunks import Move, Segment
from piper.capture.program import Pass
from piper.ir.collectives import CollectiveKind
from piper.ir.dag import Dag, Node
from piper.ir.mesh import Mesh
from piper.ir.ops import Collective, Compute, Group, Op, Select

_KINDS = {
    Move.ALL_REDUCE: CollectiveKind.ALL_REDUCE,
    Move.ALL_GATHER: CollectiveKind.ALL_GATHER,
    Move.REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
    Move.ALL_TO_ALL: CollectiveKind.ALL_TO_ALL,
}


def add_redistributions(dag: Dag) -> Dag:
    """``dag`` without passes that are redistributions; every gradient is one value."""
    if not dag.tensor:
        return dag
    ops = _Ops()
    same: dict[int, int] = {}
    """Values that are others under another number."""
    gone: dict[int, tuple[int, ...]] = {}
    """Nodes that do nothing, and those that they come after."""
    nodes: dict[int, Node] = {}
    for number, node in enumerate(dag.nodes):
        segment = _moving(dag, node)
        if segment is None or (found := segment.redistribution) is None:
            nodes[number] = node
            continue
        rule = dag.rule(node.compute.chunk, segment.axis)
        forward = node.compute.which is Pass.F
        move = found.forward if forward else found.backward
        if move is Move.NOTHING:
            (read,), (made,) = node.reads, node.writes
            same[made] = read
            gone[number] = tuple(dag.predecessors(number))
        else:
            op = ops.of(move, node.devices, node.mesh, rule.axis)
            nodes[number] = replace(
                node,
                op=op,
                stream=rule.stream if isinstance(op, Collective) else node.stream,
                made_by=rule.made_by,
            )
    return _renumbered(dag, nodes, same, gone)


def _moving(dag: Dag, node: Node) -> Segment | None:
    return dag.model.chunks[node.op.chunk].moving if isinstance(node.op, Compute) else None


class _Ops:
    """Equal operations are one object, since passes tell groups apart by identity."""

    def __init__(self) -> None:
        self._known: dict[tuple[Move, int, str], Op] = {}
        self._groups: dict[tuple[int, str], tuple[Group, ...]] = {}

    def of(self, move: Move, devices: Group, mesh: Mesh | None, axis: str) -> Op:
        assert mesh is not None
        key = move, id(devices), axis
        if key not in self._known:
            groups = self._groups.setdefault((id(devices), axis), mesh.groups(axis))
            self._known[key] = (
                Select(groups) if move is Move.SELECT else Collective(_KINDS[move], groups)
            )
        return self._known[key]


def _renumbered(
    dag: Dag, nodes: dict[int, Node], same: dict[int, int], gone: dict[int, tuple[int, ...]]
) -> Dag:
    """``dag`` with ``nodes`` alone, that read what values are the same as."""
    place = {number: i for i, number in enumerate(nodes)}

    def value(number: int) -> int:
        while number in same:
            number = same[number]
        return number

    def before(number: int) -> list[int]:
        if number in place:
            return [place[number]]
        return [p for other in gone[number] for p in before(other)]

    kept = []
    for node in nodes.values():
        pairs = [
            (p, by) for n, by in zip(node.after, node.after_by, strict=True) for p in before(n)
        ]
        after = dict(pairs)
        kept.append(
            replace(
                node,
                reads=tuple(map(value, node.reads)),
                after=tuple(after),
                after_by=tuple(after.values()),
            )
        )
    return replace(dag, nodes=tuple(kept))
