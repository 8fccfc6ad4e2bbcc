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
import math
from collections.abc import Callable, Sequence

import numpy as np

from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.edges import Edges
from piper.ir.dag.values import Content
from piper.ir.ops import Collective, Transfer, Update
from piper.ir.plan.issue_order import IssueOrder
from piper.ir.plan.rank_classes import RankClasses
from piper.lower.communication.sorted_rows import brought_in_turn

Resource = tuple[int, str]


def resources(classes: RankClasses, node: Node) -> tuple[Resource, ...]:
    """The streams that a node occupies. Sends and receives have separate streams."""
    if isinstance(node.op, Transfer):
        sends = [(c, f"{node.stream}/send") for c in classes.touched(node.op.source)]
        receives = [(c, f"{node.stream}/recv") for c in classes.touched(node.op.target)]
        return (*sends, *receives)
    return tuple((c, node.stream) for c in classes.touched(node.devices))


def schedule(dag: Dag, classes: RankClasses, duration: Callable[[Node], float]) -> IssueOrder:
    """Run ``dag``: the node that can start earliest goes next; ties go to the most urgent."""
    examples, kinds = dag.examples, dag.kinds.of.tolist()
    by_kind = [duration(node) for node in examples]
    lengths = [by_kind[kind] for kind in kinds]
    late = [_reduces(dag, node) or isinstance(node.op, Update) for node in examples]
    ranks = _ranks(dag, lengths)
    needs_of, resource_count = _needs(classes, examples)
    needs = [needs_of[kind] for kind in kinds]
    free = [0.0] * resource_count
    start, end = [0.0] * len(dag.nodes), [0.0] * len(dag.nodes)
    ready: list[tuple[float, bool, float, int]] = []
    earliest = [0.0] * len(dag.nodes)
    counted = [isinstance(node.op, Collective) and node.op.in_turn for node in examples]
    counts = {
        n: brought_in_turn(dag, dag.nodes[n]) for n, kind in enumerate(kinds) if counted[kind]
    }
    known = list(earliest) if counts else earliest
    """When the inputs of a node are ready, except counts that its own stream delivers just before
    it."""
    starts, followers = dag.edges.followers.starts.tolist(), dag.edges.followers.items.tolist()
    left = dag.edges.waiting.tolist()
    released = [number for number, count in enumerate(left) if count == 0]
    order: list[int] = []
    while ready or released:
        for number in released:
            possible, behind = earliest[number], late[kinds[number]]
            # among those that may wait, first come, first served: it holds its gradients longest
            rank = possible if behind else ranks[number]
            for resource in needs[number]:
                if free[resource] > possible:
                    possible = free[resource]
            heapq.heappush(ready, (possible, behind, rank, number))
        released = []
        possible, behind, rank, number = ready[0]
        now = earliest[number]
        for resource in needs[number]:
            if free[resource] > now:
                now = free[resource]
        if now > possible:
            heapq.heapreplace(ready, (now, behind, rank, number))
            continue
        heapq.heappop(ready)
        start[number] = now
        end[number] = then = now + lengths[number]
        for resource in needs[number]:
            free[resource] = then
        order.append(number)
        for other in followers[starts[number] : starts[number + 1]]:
            if counts and known[other] < then and counts.get(other) != number:
                known[other] = then
            if earliest[other] < then:
                earliest[other] = then
            left[other] -= 1
            if left[other] == 0:
                released.append(other)
    assert len(order) == len(dag.nodes), "verify lets no cycle through"
    eager = [_eager(dag, node) for node in examples]
    """Whether a kind of nodes is issued before its streams are free."""
    keys = [(0.0, True)] * len(order)
    """When nodes are issued. At equal times, communications come first."""
    tied = [False] * len(order)
    """Whether a predecessor of the node is issued and done at the same moment. Then the node must
    not overtake other nodes of that moment."""
    last: list[tuple[float, bool]] = [(-math.inf, False)] * resource_count
    """By stream, of its last node."""
    for number in order:
        key = (start[number], True)
        if eager[kinds[number]]:
            key = (known[number], tied[number])
            for resource in needs[number]:
                if last[resource] > key:
                    key = last[resource]
        for resource in needs[number]:
            last[resource] = key
        keys[number] = key
        if end[number] == key[0]:
            for following in followers[starts[number] : starts[number + 1]]:
                tied[following] = True
    times, computes = zip(*[keys[number] for number in order], strict=True)
    issued = np.array(order, np.int64)[np.lexsort((computes, times))]
    return IssueOrder(tuple(issued.tolist()), tuple(start), tuple(end))


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


_REDUCING = (Move.ALL_REDUCE, Move.REDUCE_SCATTER)


def _reduces(dag: Dag, node: Node) -> bool:
    """Whether a node reduces parameter gradients or scalars: no pass waits for it."""
    if node.writes[0] < dag.first_extra:
        return False
    return isinstance(node.op, Collective) and node.op.kind in _REDUCING


def _needs(classes: RankClasses, nodes: Sequence[Node]) -> tuple[list[tuple[int, ...]], int]:
    """``resources`` of nodes as numbers, and how many there are."""
    numbers: dict[Resource, int] = {}
    known: dict[tuple[object, ...], tuple[int, ...]] = {}
    needs = []
    for node in nodes:
        key = (node.stream, *map(id, node.endpoints))
        if key not in known:
            known[key] = tuple(
                [numbers.setdefault(r, len(numbers)) for r in resources(classes, node)]
            )
        needs.append(known[key])
    return needs, len(numbers)


def _ranks(dag: Dag, lengths: Sequence[float]) -> list[int]:
    """A number for each node that is smaller for more urgent ones: those with the longest remaining
    path, of these those that send."""
    sends = np.array([isinstance(node.op, Transfer) for node in dag.examples], bool)
    urgency = np.array(_tails(dag.edges, lengths)), sends[dag.kinds.of]
    order = np.lexsort((urgency[1], urgency[0]))[::-1]
    differs = [np.diff(key[order], prepend=key[order[:1]]) != 0 for key in urgency]
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.cumsum(differs[0] | differs[1])
    return ranks.tolist()


def _tails(edges: Edges, lengths: Sequence[float]) -> list[float]:
    """The longest remaining path from each node on."""
    starts, followers = edges.followers.starts.tolist(), edges.followers.items.tolist()
    tails = [0.0] * len(lengths)
    for number in reversed(edges.order.tolist()):
        longest = 0.0
        for following in followers[starts[number] : starts[number + 1]]:
            if tails[following] > longest:
                longest = tails[following]
        tails[number] = longest + lengths[number]
    return tails
