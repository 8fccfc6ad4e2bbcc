"""What an order says of nodes on different devices, where nothing but the flow of data keeps it.

``order`` is kept on each device. A pair on different devices is kept if the second needs what the
first makes; it cannot be kept if the first needs the second; else nobody would keep it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import Dag, Node, group_text, name_of
from piper.ir.passes import Pass


def refuse_crossing(dag: Dag, groups: Sequence[Sequence[int]]) -> None:
    """Refuse groups of nodes, in their order, that contradict the flow of data between devices, or
    of which one has no device and no data in common with any other."""
    places = [dag.nodes[number].devices for group in groups for number in group]
    if len(groups) < 2 or len(set({id(devices): devices for devices in places}.values())) < 2:
        return
    place = {number: i for i, group in enumerate(groups) for number in group}
    in_flow = sorted(range(len(dag.nodes)), key=lambda number: natural(dag.nodes[number]))
    made = dag.producers
    needs = {n: [made[v] for v in dag.nodes[n].reads if v in made] for n in in_flow}
    behind = _reached(in_flow, needs, place, last=True)
    for number, i in place.items():
        other = behind[number]
        if other is not None and place[other] > i and _apart(dag, number, other):
            raise DirectiveError(
                f"{_named(dag, number)} comes before {_named(dag, other)} here, but needs what "
                "that one makes: order them as the data flows, or leave one out"
            )
    _refuse_alone(dag, groups, place, in_flow, needs)


def natural(node: Node) -> tuple[int, bool, int]:
    """Microbatch by microbatch; forwards from the first chunk on, then backwards from the last."""
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
        for one in before:
            feeds[one].append(number)
    for flow, edges in ((in_flow, needs), (in_flow[::-1], feeds)):
        for last in (True, False):
            found = _reached(flow, edges, place, last=last)
            alone -= {i for n, i in place.items() if (o := found[n]) is not None and place[o] != i}
    for i in sorted(alone):
        if groups[i]:
            raise DirectiveError(
                f"{_named(dag, groups[i][0])} shares no device with what is ordered beside it, and "
                "no data flows between them: devices do not wait for one another without data, so "
                "nothing would keep this order; leave it out, or place them on one device"
            )


def _reached(
    flow: Iterable[int],
    edges: Mapping[int, Sequence[int]],
    place: Mapping[int, int],
    *,
    last: bool,
) -> dict[int, int | None]:
    """For each node, of the ordered nodes that ``edges`` lead to, one with the last (or first)
    place; ``flow`` has the nodes at the end of an edge before those at its start."""
    best = max if last else min
    found: dict[int, int | None] = {}
    for number in flow:
        met = [n for one in edges[number] for n in (one, found[one]) if n is not None]
        met = [n for n in met if n in place]
        found[number] = best(met, key=place.__getitem__) if met else None
    return found


def _apart(dag: Dag, one: int, other: int) -> bool:
    return set(dag.nodes[one].devices).isdisjoint(dag.nodes[other].devices)


def _named(dag: Dag, number: int) -> str:
    return f"{name_of(dag, number)} on devices [{group_text(dag.nodes[number].devices)}]"
