"""The training DAG: typed nodes over groups of devices, joined by values and order edges.

A node is one operation that a whole group of devices runs together: n devices are one node, not n.
A DAG is immutable; each directive makes a new one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from msgspec import Struct

from piper.base.units import wrapped
from piper.ir.collectives import Move
from piper.ir.dag.edges import Edges
from piper.ir.dag.facts import Model
from piper.ir.dag.node_kinds import NodeKinds, Operations
from piper.ir.dag.values import Content, Extra, Role, Value, ValueTable
from piper.ir.mesh import Mesh
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
from piper.ir.passes import Pass, RematPolicy
from piper.ir.rules import (
    P2P,
    Bucket,
    SendRule,
    ShardRule,
    StateRule,
    StreamRule,
    TensorRule,
    shard_numel,
)

Tag = int | Pass
Tags = Mapping[str, Tag]

PASS = "PASS"


class Node(Struct, frozen=True, gc=False):
    """One operation: its op, devices, stream, reads, writes and order edges."""

    op: Op
    tags: Tags
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    devices: Group = ()
    """Empty until placed."""
    mesh: Mesh | None = None
    """Its devices with named axes, if ``place`` got a mesh."""
    replicas: int = 1
    """How many adjacent devices have the same rows and compute the same values."""
    stream: str = COMPUTE
    after: tuple[int, ...] = ()
    """Nodes that must finish first, besides the makers of ``reads``."""
    after_by: tuple[int, ...] = ()
    """For each of ``after``, the entry of the DAG's history that orders it."""
    sends: SendRule = P2P
    """How it sends its values to other groups."""
    ordered_by: int = 0
    """The last entry of the DAG's history that ordered it; 0 if none has."""
    made_by: int = 0
    """The entry of the DAG's history that made the node or last changed it."""

    @property
    def parts(self) -> int:
        """The number of devices over which the rows of a microbatch are sharded."""
        return len(self.devices) // self.replicas

    def replica(self, rank: int) -> Group:
        """The devices that together hold all rows once, including member ``rank``."""
        step = self.replicas
        return self.devices if step == 1 else self.devices[rank % step :: step]

    @property
    def endpoints(self) -> tuple[Group, ...]:
        """The groups that take part: for a transfer, the source and the target."""
        op = self.op
        return (op.source, op.target) if isinstance(op, Transfer) else (self.devices,)

    def changed_by(self, entry: int) -> int:
        """``made_by`` if the history's ``entry`` changes the node: the last of both, since orders
        act after the layout and may be written before it."""
        return max(self.made_by, entry)

    @property
    def compute(self) -> Compute:
        """The op of a compute node: before lowering, every node is one."""
        assert isinstance(self.op, Compute)
        return self.op


@dataclass(frozen=True)
class Dag:
    """One whole training step over all devices. A node's number is its index in ``nodes``."""

    model: Model
    table: ValueTable
    nodes: tuple[Node, ...]
    history: tuple[str, ...] = ("build",)
    """The directives applied so far, as written; a node's ``made_by`` points here."""
    microbatches: tuple[str, int] | None = None
    """The tag of the microbatches and their number, once the batch is split."""
    state: Mapping[int, StateRule] = field(default_factory=dict)
    """By chunk."""
    shards: Mapping[int, ShardRule] = field(default_factory=dict)
    """By chunk."""
    tensor: Mapping[int, tuple[TensorRule, ...]] = field(default_factory=dict)
    """By chunk, one rule per axis."""
    remat: Mapping[int, RematPolicy] = field(default_factory=dict)
    """By chunk, where it differs from the model's policy."""
    streams: Mapping[str, StreamRule] = field(default_factory=dict)
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The number of regions in each stage, by the tag of the stages."""
    extra: tuple[Extra, ...] = ()
    """Values that lowering added; their numbers follow the values of all microbatches."""
    buckets: tuple[Bucket, ...] = ()

    def text(self, *words: str) -> str:
        """The directives, numbered, then one line per node. With ``words``, only the node lines
        that contain one of them, such as ``"MB[0]"`` or ``"send"``."""
        return text(self, *words)

    def __str__(self) -> str:
        return self.text()

    @cached_property
    def first_extra(self) -> int:
        """The number of the first value that lowering added."""
        return self.table.size * (self.microbatches[1] if self.microbatches else 1)

    def maker(self, value: int) -> int | None:
        """The number of the node that makes a value; None if no node does."""
        makers = self.edges.makers_one_by_one
        maker = makers[value] if value < len(makers) else -1
        return None if maker < 0 else maker

    def source(self, value: int) -> Node:
        """The node that makes a value; one must."""
        maker = self.maker(value)
        assert maker is not None, "no node makes the value"
        return self.nodes[maker]

    @cached_property
    def edges(self) -> Edges:
        """What all nodes read, write and wait for."""
        return Edges(self.nodes)

    @cached_property
    def operations(self) -> Operations:
        """What all nodes do, and where."""
        return Operations().followed_by(self.nodes)

    @cached_property
    def kinds(self) -> NodeKinds:
        """The kinds of its nodes. Groups and operations that are equal should be one object."""
        return NodeKinds(
            self.nodes,
            self.operations,
            self.edges,
            self.extra,
            self.table.size,
            self.first_extra,
        )

    @property
    def examples(self) -> list[Node]:
        """The first node of each kind."""
        return [self.nodes[number] for number in self.kinds.examples]

    def role(self, value: int) -> Role | None:
        """The role of a value of the model; None for a value that lowering added."""
        return None if value >= self.first_extra else self.table.roles[value % self.table.size]

    def activations(self, of: int) -> list[int]:
        """The numbers of a value of the model, of each microbatch in which a node makes it."""
        size, maker = self.table.size, self.maker
        mine = [
            i
            for i, value in enumerate(self.table.values)
            if value.role is Role.ACTIVATION and value.of == of
        ]
        return [n for i in mine for n in range(i, self.first_extra, size) if maker(n) is not None]

    def plain(self, value: int) -> int:
        """The model's value that an added value is a form of; other values are returned as is."""
        while value >= self.first_extra:
            value = self.extra[value - self.first_extra].of
        return value

    def predecessors(self, number: int) -> list[int]:
        """The nodes that must finish before node ``number`` starts."""
        node = self.nodes[number]
        before = [maker for v in node.reads if (maker := self.maker(v)) is not None]
        before += node.after
        return before

    @cached_property
    def tag_values(self) -> Mapping[str, frozenset[Tag]]:
        """Every tag of the nodes, and its values."""
        values: dict[str, set[Tag]] = {}
        for node in self.nodes:
            for name, tag in node.tags.items():
                values.setdefault(name, set()).add(tag)
        return {name: frozenset(tags) for name, tags in values.items()}

    def shard(self, chunk: int, parameter: str) -> ShardRule | None:
        """How a chunk's parameter is sharded, by expert or tensor parallelism."""
        if (experts := self.shards.get(chunk)) is not None:
            return experts
        for segment in self.model.chunks[chunk].segments:
            if (shard := segment.parameters.get(parameter)) is not None:
                rule = self.rule(chunk, segment.axis)
                return ShardRule(
                    rule.ways,
                    shard.dim,
                    rule.stream,
                    rule.made_by,
                    rule.stride,
                    shard.sections,
                    rule.axis,
                )
        return None

    def rule(self, chunk: int, axis: str) -> TensorRule:
        """How a chunk is sharded along an axis."""
        return next(rule for rule in self.tensor[chunk] if rule.axis == axis)

    def copy_of(self, node: Node, rank: int) -> int:
        """The replica of a node's result that member ``rank`` computes. Members with the same
        number compute one replica together."""
        place = rank % node.replicas
        if node.replicas > 1 and isinstance(node.op, Compute):
            for rule in self.sharded_along(node.op.chunk):
                place -= place // rule.stride % rule.ways * rule.stride
        return place

    def sharded_along(self, chunk: int) -> tuple[TensorRule, ...]:
        """The rules of the axes along which devices compute a chunk on different shards."""
        segments = self.model.chunks[chunk].segments
        return tuple(self.rule(chunk, s.axis) for s in segments if s.sharded)

    def numel(self, chunk: int, parameter: str) -> int:
        """Elements in a device's shard of a chunk's parameter."""
        shape, rule = self.model.parameters[parameter].shape, self.shard(chunk, parameter)
        return shard_numel(shape, rule.dim, rule.ways) if rule else math.prod(shape)

    def policy(self, chunk: int) -> RematPolicy:
        """The rematerialization policy of ``chunk``."""
        return self.remat.get(chunk, self.model.remat)

    def with_nodes(self, changed: Mapping[int, Node]) -> Dag:
        """This DAG with some nodes replaced, by number."""
        nodes = list(self.nodes)
        for number, node in changed.items():
            nodes[number] = node
        return replace(self, nodes=tuple(nodes))

    def rewired(self, nodes: Sequence[Node], **changes: Any) -> Dag:
        """This DAG with ``nodes``, and other fields in ``changes``. The nodes that it has do what
        they did, in the same places, and may read, write and wait for others; more may follow."""
        after = replace(self, nodes=tuple(nodes), **changes)
        after.__dict__["operations"] = self.operations.followed_by(nodes[len(self.nodes) :])
        return after

    def divided(self, nodes: Sequence[Node], passes: Mapping[int, Sequence[Pass]]) -> Dag:
        """This DAG with ``nodes``: some of its nodes, by number in ascending order, have become
        these passes."""
        after = replace(self, nodes=tuple(nodes))
        after.__dict__["operations"] = self.operations.divided(passes)
        return after

    def noted(self, *directives: str) -> Dag:
        """This DAG with more entries in its history; the first has number ``len(self.history)``."""
        return replace(self, history=(*self.history, *directives))

    def label(self, entry: int) -> str:
        """A history entry in short: its number and the directive's name."""
        return f"{entry}:{self.history[entry].split('(')[0].strip()}"


_MADE_BY = {Transfer: "received", Add: "added", Compute: "uncombined", Update: "updated"}
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
    """The directives, numbered, then one line per node: number, pass, tags, devices, reads ->
    writes, order edges, and the directive that last changed it. With ``words``, only the node
    lines that contain one of them."""
    head = [wrapped(f"# {i}:{directive}", "#     ") for i, directive in enumerate(dag.history)]
    lines = [f"{i:>3} {_node(dag, node)}" for i, node in enumerate(dag.nodes)]
    if words:
        return "\n".join(line for line in lines if any(word in line for word in words))
    return "\n".join([*head, *lines])


def group_text(group: Group) -> str:
    """A group of devices, with runs and regular rows of more than four in short: ``0-7,16`` and
    ``0,8,...,56``. At most eight parts are shown."""
    parts: list[str] = []
    at = 0
    while at < len(group) and len(parts) < 8:
        end = _row_end(group, at)
        first, last = group[at], group[end - 1]
        if end - at <= 4:
            parts.append(str(first))
            end = at + 1
        else:
            step = group[at + 1] - first
            parts.append(f"{first}-{last}" if step == 1 else f"{first},{first + step},...,{last}")
        at = end
    return ",".join(parts + ["..."] * (at < len(group)))


def _row_end(group: Group, at: int) -> int:
    """The end of the row of equal steps upwards that begins at ``at``."""
    step = max(group[at + 1] - group[at], 1) if at + 1 < len(group) else 1
    whole = range(group[at], group[at] + step * (len(group) - at), step)
    if group[-1] == whole[-1] and group[at:] == tuple(whole):  # fast for thousands of devices
        return len(group)
    end = at + 1
    while end < len(group) and group[end] - group[end - 1] == step:
        end += 1
    return end


def devices_text(group: Group) -> str:
    """``device 0``, or ``devices 0,1,4``."""
    return f"device{'s' if len(group) > 1 else ''} {group_text(group)}"


def name_of(dag: Dag, number: int) -> str:
    """A node in the user's names: its pass and tags."""
    return _label(dag, dag.nodes[number])


def region_of(dag: Dag, chunk: int) -> str:
    """A chunk in the user's names: its tags."""
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
    first, last = words_of(dag, node)
    return named(first, node.tags, last)


def words_of(dag: Dag, node: Node) -> tuple[str, str]:
    """A node's name before and after its tags."""
    return _verb(node.op), " ".join([*_segment(dag, node), *_scalar(dag, node)])


def named(first: str, tags: Tags, last: str) -> str:
    """The name of a node with these words and tags."""
    words = [f"{name}[{tag}]" for name, tag in tags.items() if name != PASS]
    return " ".join([first, *words, last] if last else [first, *words])


def _segment(dag: Dag, node: Node) -> list[str]:
    """The segment of its region that a pass computes, under tensor parallelism."""
    segments = dag.model.chunks[node.op.chunk].segments if isinstance(node.op, Compute) else ()
    return [f"segment[{'.'.join(str(s.number) for s in segments)}]"] if segments else []


def _scalar(dag: Dag, node: Node) -> list[str]:
    """The step-wide value (loss, norm, output or load) that a collective makes, if any."""
    if not isinstance(node.op, Collective) or node.writes[0] < dag.first_extra:
        return []
    content = dag.extra[node.writes[0] - dag.first_extra].content
    return [content.value] if content.of_step else []


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
        extra, word = dag.extra[number - dag.first_extra], how_made(dag, number)
        if extra.content.of_step:
            return word
        of = _value(dag, extra.of) if extra.content is Content.VALUE else f"bucket{extra.of}"
        return f"{word}({of})"
    value, microbatch = dag.table.value(number)
    suffix = f".{microbatch}" if dag.microbatches else ""
    return _unsplit(value) + suffix


def how_made(dag: Dag, number: int) -> str:
    """How a value that lowering added is made, in a word."""
    extra, op = dag.extra[number - dag.first_extra], dag.source(number).op
    match extra.content:
        case _ if not isinstance(op, Collective):
            return _MADE_BY[type(op)]
        case Content.VALUE:
            return "dispatched" if op.dispatches else "redistributed"
        case Content.GRADIENTS:
            first = op.kind is Move.REDUCE_SCATTER or dag.buckets[extra.of].level == 0
            return "reduced" if first else "summed"
        case Content.PARAMETERS:
            return "gathered"
        case content:
            return content.value


def _unsplit(value: Value) -> str:
    number = "" if value.role is Role.SEED else str(value.of)
    by = f"/{value.by}" if value.role is Role.GRADIENT else ""
    by += f"+{value.term}" if value.term else ""
    return f"{_SHORT[value.role]}{number}{by}"
