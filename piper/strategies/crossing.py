"""Check orders between nodes on different devices, which only data flow can enforce.

Each device enforces ``order`` among its own nodes. An order between nodes on different devices
holds if the second needs the output of the first. It is impossible if the first needs the output of
the second. Otherwise nothing enforces it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, Node, group_text, name_of
from piper.ir.passes import Pass


def refuse_crossing(dag: Dag, groups: Sequence[Sequence[int]]) -> None:
    """Refuse ordered groups of nodes that contradict the data flow between devices, or a group that
    shares no device and no data with any other."""
    places = [dag.nodes[number].devices for group in groups for number in group]
    if len(groups) < 2 or len(set({id(devices): devices for devices in places}.values())) < 2:
        return
    place = {number: i for i, group in enumerate(groups) for number in group}
    in_flow = sorted(range(len(dag.nodes)), key=lambda number: natural(dag.nodes[number]))
    needs = {n: [m for v in dag.nodes[n].reads if (m := dag.maker(v)) is not None] for n in in_flow}
    behind = _reached(in_flow, needs, place, last=True)
    for number, i in place.items():
        other = behind[number]
        if other is not None and place[other] > i and _apart(dag, number, other):
            raise DirectiveError(
                f"{_named(dag, number)} comes before {_named(dag, other)} here, but needs "
                "the result of the other: order them as the data flows, or leave one out"
            )
    _refuse_alone(dag, groups, place, in_flow, needs)


def natural(node: Node) -> tuple[int, bool, int]:
    """Sort key: by microbatch; forwards from the first chunk on, then backwards from the last."""
    op = node.compute
    forward = op.which is Pass.F
    return op.microbatch, not forward, op.chunk if forward else -op.chunk


def _refuse_alone(
    dag: Dag,
    groups: Sequence[Sequence[int]],
    place: Mapping[int, int],
    in_flow: Sequence[int],
    needs: Mapping[int, Sequence[int]],
) -> None:
    devices = [{d for number in group for d in dag.nodes[number].devices} for group in groups]
    shared = Counter(device for group in devices for device in group)
    alone = {i for i, mine in enumerate(devices) if all(shared[d] == 1 for d in mine)}
    if not alone:
        return
    feeds: dict[int, list[int]] = {number: [] for number in in_flow}
    for number, before in needs.items():
        for producer in before:
            feeds[producer].append(number)
    for flow, edges in ((in_flow, needs), (in_flow[::-1], feeds)):
        for last in (True, False):
            other = _reached(flow, edges, place, last=last)
            alone -= {i for n, i in place.items() if (o := other[n]) is not None and place[o] != i}
    for i in sorted(alone):
        if groups[i]:
            raise DirectiveError(
                f"{_named(dag, groups[i][0])} shares no device with what is ordered beside it, and "
                "no data flows between them: devices do not wait for one another without data, so "
                "nothing would enforce this order; leave it out, or place them on one device"
            )


def _reached(
    flow: Iterable[int],
    edges: Mapping[int, Sequence[int]],
    place: Mapping[int, int],
    *,
    last: bool,
) -> dict[int, int | None]:
    """For each node, the reachable ordered node with the last (or first) place. Every edge leads to
    an earlier node of ``flow``."""
    best = max if last else min
    reached: dict[int, int | None] = {}
    for number in flow:
        met = [n for end in edges[number] for n in (end, reached[end]) if n is not None]
        met = [n for n in met if n in place]
        reached[number] = best(met, key=place.__getitem__) if met else None
    return reached


def _apart(dag: Dag, one: int, other: int) -> bool:
    return set(dag.nodes[one].devices).isdisjoint(dag.nodes[other].devices)


def _named(dag: Dag, number: int) -> str:
    return f"{name_of(dag, number)} on devices [{group_text(dag.nodes[number].devices)}]"
