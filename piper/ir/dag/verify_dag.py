"""The invariants of a DAG, checked after every directive.

The DAG with its order edges is acyclic. Exactly one node makes each value, before its first use.
All passes of a chunk for one microbatch run on one group. An error names the nodes in the user's
names and the responsible directive.
"""

from __future__ import annotations

import numpy as np

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import PASS, Dag, group_text, name_of
from piper.ir.dag.ragged import numbered
from piper.ir.dag.values import GIVEN
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.ops import Compute, Group


def verify(dag: Dag) -> None:
    """Raise a ``DirectiveError`` that names the nodes and the directive if ``dag`` cannot run."""
    _one_producer(dag)
    refuse_scattered(dag)
    cycle = _cycle(dag)
    if cycle:
        raise DirectiveError(_describe(dag, cycle))


def _one_producer(dag: Dag) -> None:
    writes, reads = dag.edges.writes.items, dag.edges.reads.items
    assert np.bincount(writes).max(initial=0) <= 1, "a directive doubled a value"
    unmade = reads[dag.edges.makers < 0].tolist()
    assert all(dag.role(number) in GIVEN for number in unmade), "a directive lost a value"


def refuse_scattered(dag: Dag) -> None:
    """Refuse passes of one chunk and microbatch on different groups."""
    it, numbers = dag.operations, EqualNumbers[Group]()
    groups = np.array([numbers.of(group) if group else -1 for group, _ in it.groups], np.int64)
    there = np.flatnonzero((groups[it.places] >= 0) & (it.chunks >= 0))
    made = it.chunks[there] * (it.microbatches.max(initial=0) + 1) + it.microbatches[there]
    which, first = numbered(made)
    first, placed = there[first][which], groups[it.places]
    for at in np.flatnonzero(placed[there] != placed[first])[:1].tolist():
        node, other = dag.nodes[there[at]], dag.nodes[first[at]]
        raise DirectiveError(
            f"{name_of(dag, there[at])} is placed on {list(node.devices)}, but other passes "
            f"of the same chunk and microbatch on {list(other.devices)}: what a forward saves "
            "cannot move; place all passes of a region together"
        )


def _cycle(dag: Dag) -> list[int]:
    """The nodes of a cycle in order; empty if there is none."""
    left = np.ones(len(dag.nodes), bool)
    left[dag.edges.order] = False
    waiting = dict.fromkeys(np.flatnonzero(left).tolist())
    if not waiting:
        return []
    path: list[int] = [next(iter(waiting))]
    seen = {path[0]: 0}
    while True:  # each remaining node waits for another remaining node
        before = next(p for p in dag.predecessors(path[-1]) if p in waiting)
        if before in seen:
            return list(reversed(path[seen[before] :]))
        seen[before] = len(path)
        path.append(before)


def _describe(dag: Dag, cycle: list[int]) -> str:
    """The cycle in the user's names; consecutive nodes of one pass and group are one line."""
    runs: list[tuple[str, str]] = []
    orders: set[int] = set()
    for number, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        how = "feeds"
        node = dag.nodes[following]
        if number in node.after:
            by = node.after_by[node.after.index(number)]
            orders.add(by)
            how = f"before, by {dag.label(by)},"
        if runs and runs[-1][0] == _placed(dag, number):
            runs.pop()
        runs.append((_placed(dag, number), how))
    if len(runs) > 1 and runs[0][0] == runs[-1][0]:
        runs.pop()
    ordered = [i for i, (_, how) in enumerate(runs) if how != "feeds"]
    first = min(ordered, key=lambda i: runs[i][0], default=0)
    runs = runs[first:] + runs[:first]
    lines = [
        "the orders contradict each other or the flow of data, so that no device could continue:"
    ]
    lines += [f"  {name}  {how}" for name, how in runs]
    lines.append(f"  {runs[0][0]}")
    lines += [f"  {dag.label(entry)} is {dag.history[entry]}" for entry in sorted(orders)]
    lines.append("change one of these orders")
    return "\n".join(lines)


def _placed(dag: Dag, number: int) -> str:
    """A node as orders refer to it: without the tags that differ inside a stage."""
    node = dag.nodes[number]
    if not isinstance(node.op, Compute):
        return name_of(dag, number)
    kept = {tag for tag in node.tags if tag not in dag.model.chunks[node.op.chunk].tags}
    tags = [f"{name}[{tag}]" for name, tag in node.tags.items() if name in kept and name != PASS]
    where = group_text(node.devices)
    return f"{node.op.which.value} {' '.join(tags) or name_of(dag, number)} @{where}"
