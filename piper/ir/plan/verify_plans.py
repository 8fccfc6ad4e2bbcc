"""The invariants of plans, checked at the end of every compilation in one pass.

Every slot is written before it is read, and freed once, after its last use. All participants of a
communication enter it, and communications on one communicator are entered in one order. Every
gradient of a trained parameter enters exactly one sum, over all devices that hold the parameter. A
violation is a compiler bug: users' mistakes are refused much earlier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from piper.base.errors import PiperError
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.ragged import first_of_each
from piper.ir.dag.values import Content, Role
from piper.ir.ops import Collective, Compute, Group, Transfer, Update
from piper.ir.plan.columns import Columns
from piper.ir.plan.instructions import COMMUNICATING, Verb
from piper.ir.plan.plan import Plan
from piper.ir.plan.rank_classes import RankClasses


def verify_plans(dag: Dag, classes: RankClasses, plans: Sequence[Plan]) -> None:
    """Raise a ``PiperError`` if the plans together are not one step of ``dag``."""
    columns = [Columns.of(plan.instructions) for plan in plans]
    for plan, x in zip(plans, columns, strict=True):
        if (fault := _slots_fault(plan, x)) is not None:
            raise _fault(f"devices {plan.devices[:4]} {fault}")
    _communications(dag, classes, columns)
    _gradients(dag)


def _fault(what: str) -> PiperError:
    return PiperError(f"the compiler made an invalid plan: {what}; please report this")


def _slots_fault(plan: Plan, x: Columns) -> str | None:
    """What is wrong with the slots and waits of a plan, if anything: a slot is written before it is
    read, and freed once; no instruction waits for a later one."""
    never = len(x)
    written = x.allocates.followed_by(x.writes)
    born = first_of_each(written.items, len(plan.slots))
    born = np.where(born < 0, never, np.append(written.row_of, never)[born])
    born[list(plan.first_slots)] = -1
    freed = np.full(len(plan.slots), never)
    freed[x.frees.items] = x.frees.row_of
    used = x.reads.followed_by(x.adds)
    wrong = (born[used.items] >= used.row_of) | (freed[used.items] < used.row_of)
    if wrong.any():
        return f"read at {used.row_of[wrong][0]} what nothing has written"
    if (late := x.waits.items >= x.waits.row_of).any():
        return f"wait at {x.waits.row_of[late][0]} for what comes later"
    wrong = (freed[x.frees.items] != x.frees.row_of) | (born[x.frees.items] > x.frees.row_of)
    wrong |= np.bincount(x.frees.items, minlength=len(plan.slots))[x.frees.items] > 1
    if wrong.any():
        return f"free slot {x.frees.items[wrong][0]} twice"
    if (wrong := freed[written.items] < written.row_of).any():
        return f"write slot {written.items[wrong][0]}, which is free"
    kept = (born < never) & (freed == never)
    returned = [returned.slot for returned in plan.returned]
    if not kept[returned].all():
        return f"return one of the slots {returned[:4]}, which is free"
    kept[returned] = False
    return f"never free slots {np.flatnonzero(kept)[:4].tolist()}" if kept.any() else None


def _communications(dag: Dag, classes: RankClasses, plans: Sequence[Columns]) -> None:
    """All participants are present, and the members of a communicator use it in one order.

    A communicator belongs to a stream and either a group or one direction between two devices.
    Messages arrive in the order in which they are sent, whatever the receives wait for. So sender
    and receiver must agree on the order of all messages between them, also across groups.
    """
    numbers: dict[tuple[object, ...], int] = {}  # of the communications of a stream and groups
    sides: list[list[tuple[int, ...]]] = []  # the classes of each group
    streams: list[str] = []
    examples = dag.examples
    of_kind = np.full(len(examples), -1)
    for at, node in enumerate(examples):
        if isinstance(node.op, Transfer | Collective):
            key = node.stream, *map(id, node.endpoints)
            of_kind[at] = kind = numbers.setdefault(key, len(numbers))
            if kind == len(sides):
                sides.append([classes.touched(group) for group in node.endpoints])
                streams.append(node.stream)
    kinds = of_kind[dag.kinds.of]
    there = np.zeros(len(dag.nodes), np.int64)
    sequences: defaultdict[tuple[object, ...], set[bytes]] = defaultdict(set)
    for c, x in enumerate(plans):
        for verb in COMMUNICATING:
            nodes = x.nodes[x.among(frozenset((verb,)))]
            there += np.bincount(nodes, minlength=len(there))
            used: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
            for kind in np.unique(kinds[nodes]).tolist():
                if verb is Verb.COLLECTIVE:
                    used[kind,].append(kind)
                    continue
                for other in sides[kind][verb is Verb.SEND]:
                    pair = (c, other) if verb is Verb.SEND else (other, c)
                    used[streams[kind], *pair].append(kind)
            for communicator, mine in used.items():
                sequences[communicator].add(nodes[np.isin(kinds[nodes], mine)].tobytes())
                if len(sequences[communicator]) > 1:
                    raise _fault(
                        f"the communications on stream {streams[mine[0]]!r} are entered in several "
                        "orders"
                    )
    wanted = np.array([sum(map(len, groups)) for groups in sides], np.int64)
    lacking = np.flatnonzero((kinds >= 0) & (there != np.append(wanted, 0)[kinds]))
    if len(lacking):
        raise _fault(f"node {lacking[0]} lacks some of its participants")


def _gradients(dag: Dag) -> None:
    """Every gradient of a trained parameter enters one sum over all owners of the parameter."""
    owners: defaultdict[str, dict[int, Group]] = defaultdict(dict)
    made: defaultdict[str, set[int]] = defaultdict(set)
    """Of each parameter, the values of one microbatch with its gradients."""
    for node in dag.examples:
        if not isinstance(node.op, Compute):
            continue
        for name in dag.model.chunks[node.op.chunk].parameters:
            owners[name][id(node.devices)] = node.devices
        own, tied = dag.table.parameters[node.op.chunk]
        for value in node.writes:
            role = dag.role(value)
            for name in own if role is Role.PARAMETER_GRADIENT else ():
                made[name].add(value % dag.table.size)
            for name in tied if role is Role.TIED_GRADIENT else ():
                made[name].add(value % dag.table.size)
    first, writes, reads = dag.first_extra, dag.edges.writes.items, dag.edges.reads
    lacking = np.zeros(first, np.int64)
    """For each value of the model, how often it must be summed if it is a gradient."""
    lacking[writes[writes < first]] = 1
    if dag.table.ties:  # a pass adds a tied gradient that it reads to its own
        carried = reads.items[dag.operations.chunks[reads.row_of] >= 0]
        carried = carried[carried < first]
        tied_gradient = np.array([role is Role.TIED_GRADIENT for role in dag.table.roles], bool)
        lacking[carried[tied_gradient[carried % dag.table.size]]] = 0
    summed: dict[int, list[int]] = {}
    for node in dag.examples:
        if isinstance(node.op, Update):
            summed[node.op.bucket] = [v for value in _own(dag, node) for v in _parts(dag, value)]
    for index, bucket in enumerate(dag.buckets):
        if index not in summed:
            continue
        everyone = {device for group in bucket.groups for device in group}
        terms = np.bincount(np.array(summed[index], np.int64), minlength=first)
        wrong = (terms != lacking).reshape(-1, dag.table.size).any(axis=0)
        for name in bucket.parameters:
            if everyone != {device for group in owners[name].values() for device in group}:
                raise _fault(f"the gradient of {name} is not summed over all its owners")
            if wrong[[*made[name]]].any():
                raise _fault(f"a gradient of {name} is not summed once")


def _own(dag: Dag, node: Node) -> list[int]:
    """An update's reads of its own bucket: its reduced sums, or else all gradients."""
    assert isinstance(node.op, Update)
    extra = {v: dag.extra[v - dag.first_extra] for v in node.reads if v >= dag.first_extra}
    sums = [v for v, x in extra.items() if x.content is Content.GRADIENTS]
    own = [v for v in sums if extra[v].of == node.op.bucket]
    return own or [v for v in node.reads if v not in sums]


def _parts(dag: Dag, value: int) -> tuple[int, ...]:
    """The gradients that are summed in a value."""
    if value < dag.first_extra:
        return (value,)
    if dag.extra[value - dag.first_extra].content is not Content.GRADIENTS:
        return ()
    reads = dag.source(value).reads
    return tuple(part for read in reads for part in _parts(dag, read))
