"""The invariants of plans, checked at the end of every compilation in one pass.

Every slot is written before it is read, and freed once, after its last use. All participants of a
communication enter it, and communications on one communicator are entered in one order. Every
gradient of a trained parameter enters exactly one sum, over all devices that hold the parameter. A
violation is a compiler bug: users' mistakes are refused much earlier.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from piper.base.errors import PiperError
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.values import Content, Role
from piper.ir.ops import Collective, Compute, Group, Transfer, Update
from piper.ir.plan.instructions import COMMUNICATING, Verb
from piper.ir.plan.plan import Plan
from piper.ir.plan.rank_classes import RankClasses


def verify_plans(dag: Dag, classes: RankClasses, plans: Sequence[Plan]) -> None:
    """Raise a ``PiperError`` if the plans together are not one step of ``dag``."""
    for plan in plans:
        _slots(plan)
    _communications(dag, classes, plans)
    _gradients(dag)


def _fault(what: str) -> PiperError:
    return PiperError(f"the compiler made an invalid plan: {what}; please report this")


def _slots(plan: Plan) -> None:
    """Slots are written before they are read, and freed once; no instruction waits for a later
    one."""
    if (fault := _slots_fault(plan)) is not None:
        raise _fault(f"devices {plan.devices[:4]} {fault}")


def _slots_fault(plan: Plan) -> str | None:
    """What is wrong with the slots and waits of a plan, if anything."""
    live = set(plan.first_slots)
    for pc, x in enumerate(plan.instructions):
        if not live.issuperset((*x.reads, *x.adds)):
            return f"read at {pc} what nothing has written"
        live.update((*x.allocates, *x.writes))
        for other in x.waits:
            if other >= pc:
                return f"wait at {pc} for what comes later"
        for slot in x.frees:
            if slot not in live:
                return f"free slot {slot} twice at {pc}"
            live.discard(slot)
    for returned in plan.returned:
        if returned.slot not in live:
            return f"return slot {returned.slot}, which is free"
        live.discard(returned.slot)
    return f"never free slots {sorted(live)[:4]}" if live else None


def _communications(dag: Dag, classes: RankClasses, plans: Sequence[Plan]) -> None:
    """All participants are present, and the members of a communicator use it in one order.

    A communicator belongs to a stream and either a group or one direction between two devices.
    Messages arrive in the order in which they are sent, whatever the receives wait for. So sender
    and receiver must agree on the order of all messages between them, also across groups.
    """
    participants: dict[tuple[int, ...], list[tuple[int, ...]]] = {}  # the classes of each endpoint
    there: Counter[int] = Counter()
    sequences: defaultdict[tuple[object, ...], dict[object, list[int]]] = defaultdict(dict)
    for c, plan in enumerate(plans):
        for x in plan.instructions:
            if x.verb not in COMMUNICATING:
                continue
            there[x.node] += 1
            node = dag.nodes[x.node]
            key = tuple(map(id, node.endpoints))
            if key not in participants:
                participants[key] = [classes.touched(group) for group in node.endpoints]
            sides = participants[key]
            if x.verb is Verb.SEND:
                used: list[tuple[object, ...]] = [(node.stream, c, other) for other in sides[1]]
            elif x.verb is Verb.RECV:
                used = [(node.stream, other, c) for other in sides[0]]
            else:
                used = [(node.stream, key)]
            for communicator in used:
                sequences[communicator].setdefault((x.verb, c), []).append(x.node)
    for number, node in enumerate(dag.nodes):
        if isinstance(node.op, Transfer | Collective):
            sides = participants.get(tuple(map(id, node.endpoints)), [])
            if there[number] != sum(map(len, sides)) or not sides:
                raise _fault(f"node {number} lacks some of its participants")
    for (stream, *_), rows in sequences.items():
        if len({tuple(row) for row in rows.values()}) > 1:
            raise _fault(f"the communications on stream {stream!r} are entered in several orders")


def _gradients(dag: Dag) -> None:
    """Every gradient of a trained parameter enters one sum over all owners of the parameter."""
    owners: defaultdict[str, set[Group]] = defaultdict(set)
    made: defaultdict[str, set[int]] = defaultdict(set)
    carried: set[int] = set()
    ties = bool(dag.table.ties)
    seen: set[tuple[int, int]] = set()
    for node in dag.nodes:
        if not isinstance(node.op, Compute):
            continue
        chunk = dag.model.chunks[node.op.chunk]
        if (chunk.index, id(node.devices)) not in seen:
            seen.add((chunk.index, id(node.devices)))
            for name in chunk.parameters:
                owners[name].add(node.devices)
        own, tied = dag.table.parameters[chunk.index]
        for value in node.writes:
            role = dag.role(value)
            for name in own if role is Role.PARAMETER_GRADIENT else ():
                made[name].add(value)
            for name in tied if role is Role.TIED_GRADIENT else ():
                made[name].add(value)
        if ties:
            carried.update(v for v in node.reads if dag.role(v) is Role.TIED_GRADIENT)
    summed: dict[int, list[int]] = {}
    for node in dag.nodes:
        if isinstance(node.op, Update):
            summed[node.op.bucket] = [v for value in _own(dag, node) for v in _parts(dag, value)]
    for index, bucket in enumerate(dag.buckets):
        everyone = {device for group in bucket.groups for device in group}
        terms = Counter(summed.get(index, ()))
        for name in bucket.parameters if index in summed else ():
            if everyone != {device for group in owners[name] for device in group}:
                raise _fault(f"the gradient of {name} is not summed over all its owners")
            if any(terms[value] != (value not in carried) for value in made[name]):
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
    reads = dag.nodes[dag.producers[value]].reads
    return tuple(part for read in reads for part in _parts(dag, read))
