"""The DAG as text, one node a line, for people and for golden tests."""

from __future__ import annotations

from piper.ir.dag.dag import PASS, Dag, Node
from piper.ir.dag.values import OF_STEP, ExtraRole, Role, Value
from piper.ir.ops import (
    COMPUTE,
    Add,
    Collective,
    Compute,
    Copy,
    Group,
    Op,
    Select,
    Transfer,
    Update,
)

_OF_BUCKETS = (ExtraRole.REDUCED, ExtraRole.SUMMED, ExtraRole.UPDATED, ExtraRole.GATHERED)

_SHORT = {
    Role.BATCH: "x",
    Role.SEED: "seed",
    Role.ACTIVATION: "v",
    Role.SAVED: "saved",
    Role.SAVED_FOR_BW: "saved_bw",
    Role.BI_SAVED: "bi_saved",
    Role.GRADIENT: "g",
    Role.PARAMETER_GRADIENT: "dw",
    Role.TIED_GRADIENT: "dt",
}


def text(dag: Dag, *words: str) -> str:
    """The directives, numbered, then every node on a line: number, pass, tags, devices, what it
    reads -> what it makes, order, and the directive that last moved it. With ``words``, only the
    lines of nodes that contain one of them."""
    head = [f"# {i}:{directive}" for i, directive in enumerate(dag.history)]
    lines = [f"{i:>3} {_node(dag, node)}" for i, node in enumerate(dag.nodes)]
    if words:
        return "\n".join(line for line in lines if any(word in line for word in words))
    return "\n".join([*head, *lines])


def group_text(group: Group) -> str:
    """A group of devices; a long row of neighbours as its ends."""
    if len(group) > 4 and group[-1] - group[0] == len(group) - 1 and group[1] == group[0] + 1:
        return f"{group[0]}..{group[-1]}"
    shown = [str(device) for device in group[:8]]
    return ",".join(shown + ["..."] * (len(group) > 8))


def devices_text(group: Group) -> str:
    """``device 0``, or ``devices 0,1,4``."""
    return f"device{'s' if len(group) > 1 else ''} {group_text(group)}"


def name_of(dag: Dag, number: int) -> str:
    """A node in the user's own names: its pass and tags."""
    return _label(dag, dag.nodes[number])


def region_of(dag: Dag, chunk: int) -> str:
    """A chunk in the user's own names."""
    tags = dag.model.chunks[chunk].tags
    return " ".join(f"{name}[{index}]" for name, index in tags.items()) or f"chunk {chunk}"


def _node(dag: Dag, node: Node) -> str:
    reads = " ".join(_value(dag, v) for v in node.reads)
    writes = " ".join(_value(dag, v) for v in node.writes)
    where = f" @{group_text(node.devices)}" if node.devices else ""
    stream = f" on {node.stream}" if node.stream != COMPUTE else ""
    after = f" after {' '.join(map(str, sorted(node.after)))}" if node.after else ""
    why = dag.label(node.made_by)
    return f"{_label(dag, node)}{where}{stream}: {reads} -> {writes}{after}  # {why}"


def _label(dag: Dag, node: Node) -> str:
    tags = [f"{name}[{tag}]" for name, tag in node.tags.items() if name != PASS]
    return " ".join([_verb(node.op), *tags, *_segment(dag, node), *_scalar(dag, node)])


def _segment(dag: Dag, node: Node) -> list[str]:
    """Which part of its region a pass is under tensor parallelism."""
    segments = dag.model.chunks[node.op.chunk].segments if isinstance(node.op, Compute) else ()
    return [f"segment[{'.'.join(str(s.number) for s in segments)}]"] if segments else []


def _scalar(dag: Dag, node: Node) -> list[str]:
    """What a sum over all devices is of."""
    if not isinstance(node.op, Collective) or node.writes[0] < dag.first_extra:
        return []
    role = dag.extra[node.writes[0] - dag.first_extra].role
    return [role.value] if role in OF_STEP else []


def _verb(op: Op) -> str:
    match op:
        case Compute(which=which):
            return which.value
        case Transfer(source=source, target=target):
            return f"send {group_text(source)}->{group_text(target)}"
        case Collective(kind=kind, groups=groups):
            return f"{kind.value} {_groups(groups)}"
        case Update(bucket=bucket):
            return f"update bucket{bucket}"
        case Add(value=value):
            return f"add g{value}"
        case Select(groups=groups):
            return f"select {_groups(groups)}"
        case Copy(bucket=bucket):
            return f"copy bucket{bucket}"


def _groups(groups: tuple[Group, ...]) -> str:
    shown = [group_text(group) for group in groups[:4]]
    return "|".join(shown + ["..."] * (len(groups) > 4))


def _value(dag: Dag, number: int) -> str:
    if number >= dag.first_extra:
        extra = dag.extra[number - dag.first_extra]
        if extra.role in OF_STEP:
            return extra.role.value
        bucket = extra.role in _OF_BUCKETS
        of = f"bucket{extra.of}" if bucket else _value(dag, extra.of)
        return f"{extra.role.value}({of})"
    value, microbatch = dag.table.value(number)
    suffix = f".{microbatch}" if dag.microbatches else ""
    return _unsplit(value) + suffix


def _unsplit(value: Value) -> str:
    number = "" if value.role is Role.SEED else str(value.of)
    by = f"/{value.by}" if value.role is Role.GRADIENT else ""
    by += f"+{value.term}" if value.term else ""
    return f"{_SHORT[value.role]}{number}{by}"
