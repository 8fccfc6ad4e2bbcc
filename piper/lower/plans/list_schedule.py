"""List scheduling: runs the DAG in simulated time to order all nodes.

Every rank equivalence class has streams. A stream runs one node at a time. A communication occupies
one stream of each participant at once. The issue order is the plan's order. The orders of all
devices come from one execution, so they are consistent and cannot deadlock.

A computation is issued when it starts. A communication is issued as soon as its inputs are ready
and all earlier communications on its stream are issued, even if the stream is still busy: it does
not block the device, while a computation that starts at the same moment may block it for long. Only
a gather whose result takes memory (ZeRO-3) is issued no earlier than it can start.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence

from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.values import Content
from piper.ir.ops import Collective, Transfer, Update
from piper.ir.plan.issue_order import IssueOrder
from piper.ir.plan.rank_classes import RankClasses
from piper.lower.communication.sorted_rows import brought_in_turn

Resource = tuple[int, str]


def resources(classes: RankClasses, node: Node) -> tuple[Resource, ...]:
    """The streams that a node occupies. Sends and receives have separate streams."""
    if isinstance(node.op, Transfer):
        sends = dict.fromkeys((classes.of[d], f"{node.stream}/send") for d in node.op.source)
        receives = dict.fromkeys((classes.of[d], f"{node.stream}/recv") for d in node.op.target)
        return (*sends, *receives)
    return tuple((c, node.stream) for c in classes.touched(node.devices))


def schedule(dag: Dag, classes: RankClasses, duration: Callable[[Node], float]) -> IssueOrder:
    """Run ``dag``: the node that can start earliest goes next; ties go to the most urgent."""
    lengths = [duration(node) for node in dag.nodes]
    followers, waiting = _edges(dag)
    urgency = _urgency(dag, followers, waiting, lengths)
    needs = _needs(dag, classes)
    in_turn = [_reduces(dag, node) or isinstance(node.op, Update) for node in dag.nodes]
    free: defaultdict[Resource, float] = defaultdict(float)
    start, end = [0.0] * len(dag.nodes), [0.0] * len(dag.nodes)
    ready: list[tuple[float, tuple[int, float, float], int]] = []

    def push(number: int, earliest: float) -> None:
        possible = max(earliest, *[free[r] for r in needs[number]])
        rank = urgency[number]
        if in_turn[number]:
            rank = (*_LATE, earliest)  # first come, first served: it holds its gradients longest
        heapq.heappush(ready, (possible, rank, number))

    earliest = [0.0] * len(dag.nodes)
    known = [0.0] * len(dag.nodes)
    """When the inputs of a node are ready, except counts that its own stream delivers just before
    it."""
    counts = [brought_in_turn(dag, node) for node in dag.nodes]
    issue = _Issue(dag)
    for number, count in enumerate(waiting):
        if count == 0:
            push(number, 0.0)
    order: list[int] = []
    left = list(waiting)
    while ready:
        possible, _, number = heapq.heappop(ready)
        now = max(earliest[number], *[free[r] for r in needs[number]])
        if now > possible:
            push(number, earliest[number])
            continue
        start[number], end[number] = now, now + lengths[number]
        for resource in needs[number]:
            free[resource] = end[number]
        issue.note(number, now, end[number], known[number], needs[number], followers[number])
        order.append(number)
        now = end[number]
        for following in followers[number]:
            if earliest[following] < now:
                earliest[following] = now
            if known[following] < now and counts[following] != number:
                known[following] = now
            left[following] -= 1
            if left[following] == 0:
                push(following, earliest[following])
    assert len(order) == len(dag.nodes), "verify lets no cycle through"
    return IssueOrder(issue.sorted(order), tuple(start), tuple(end))


class _Issue:
    """When nodes are issued. At equal times, communications come first."""

    def __init__(self, dag: Dag) -> None:
        self._eager = [_eager(dag, node) for node in dag.nodes]
        self._keys = [(0.0, True)] * len(dag.nodes)
        self._tied = [False] * len(dag.nodes)
        """Whether a predecessor of the node is issued and done at the same moment. Then the node
        must not overtake other nodes of that moment."""
        self._last: dict[Resource, tuple[float, bool]] = {}

    def note(
        self,
        number: int,
        start: float,
        end: float,
        ready: float,
        resources: Sequence[Resource],
        followers: Sequence[int],
    ) -> None:
        """Record the next node to start in simulated time."""
        key = (start, True)
        if self._eager[number]:
            key = (ready, self._tied[number])
            for resource in resources:
                key = max(key, self._last.get(resource, key))
        for resource in resources:
            self._last[resource] = key
        self._keys[number] = key
        if end == key[0]:
            for following in followers:
                self._tied[following] = True

    def sorted(self, order: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(order, key=self._keys.__getitem__))


def _eager(dag: Dag, node: Node) -> bool:
    match node.op:
        case Transfer():
            return True
        case Collective(kind=Move.ALL_GATHER):
            if node.writes[0] < dag.first_extra:
                return True
            made = dag.extra[node.writes[0] - dag.first_extra]
            of_state = made.content is Content.PARAMETERS
            # below ZeRO-3 the result is the parameters' own memory
            return not of_state or dag.buckets[made.of].level < 3
        case Collective():
            return True
        case _:
            return False


_LATE = (1, 0.0)
_REDUCING = (Move.ALL_REDUCE, Move.REDUCE_SCATTER)


def _reduces(dag: Dag, node: Node) -> bool:
    """Whether a node reduces parameter gradients or scalars: no pass waits for it."""
    if node.writes[0] < dag.first_extra:
        return False
    return isinstance(node.op, Collective) and node.op.kind in _REDUCING


def _needs(dag: Dag, classes: RankClasses) -> list[tuple[Resource, ...]]:
    """``resources`` of every node. Nodes with equal streams and endpoints share one tuple."""
    known: dict[tuple[object, ...], tuple[Resource, ...]] = {}
    needs = []
    for node in dag.nodes:
        key = (node.stream, *map(id, node.endpoints))
        if key not in known:
            known[key] = resources(classes, node)
        needs.append(known[key])
    return needs


def _edges(dag: Dag) -> tuple[list[list[int]], list[int]]:
    followers: list[list[int]] = [[] for _ in dag.nodes]
    waiting = [0] * len(dag.nodes)
    for number in range(len(dag.nodes)):
        before = set(dag.predecessors(number))
        waiting[number] = len(before)
        for b in before:
            followers[b].append(number)
    return followers, waiting


def _urgency(
    dag: Dag, followers: Sequence[list[int]], waiting: Sequence[int], lengths: Sequence[float]
) -> list[tuple[int, float, float]]:
    """Smaller is more urgent. Reductions and updates come last; then the longest remaining path
    comes first; then transfers precede other nodes."""
    left = list(waiting)
    order = [n for n, count in enumerate(left) if count == 0]
    for number in order:
        for following in followers[number]:
            left[following] -= 1
            if left[following] == 0:
                order.append(following)
    tail = [0.0] * len(dag.nodes)
    for number in reversed(order):
        after = max([tail[f] for f in followers[number]], default=0.0)
        tail[number] = after + lengths[number]
    urgency: list[tuple[int, float, float]] = []
    for number, node in enumerate(dag.nodes):
        late = int(_reduces(dag, node) or isinstance(node.op, Update))
        urgency.append((late, -tail[number], 0 if isinstance(node.op, Transfer) else 1))
    return urgency
