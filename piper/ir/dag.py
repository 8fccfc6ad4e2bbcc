"""The training DAG: typed nodes over groups of devices, joined by values and by order.

A node is one piece of work that a whole group of devices does together; a group of n devices is
one node, not n. A DAG is never changed: directives make new ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import torch

from piper.capture.chunks import ContextAttention, Style
from piper.capture.program import Pass
from piper.capture.saving import RematPolicy
from piper.ir.collectives import CollectiveKind
from piper.ir.facts import Model
from piper.ir.mesh import Mesh
from piper.ir.values import Extra, ValueTable

Group = tuple[int, ...]
Tag = int | Pass
Tags = Mapping[str, Tag]

PASS = "PASS"


def same_group(a: Group, b: Group) -> bool:
    """Whether two groups are equal: fast where they are one object, as they mostly are."""
    return a is b or a == b


COMPUTE = "compute"
COPY = "copy"
"""The stream on which state is copied on the host."""


@dataclass(frozen=True, slots=True)
class Compute:
    """One pass of one chunk for one microbatch."""

    chunk: int
    which: Pass
    microbatch: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send with its receive: what one group has, another gets. Both divide the value along
    ``dim``, each evenly among its members and in their order."""

    source: Group
    target: Group
    dim: int = 0
    replicas: tuple[int, int] = (1, 1)
    """How many neighbours in the source, and in the target, have the same part."""
    counts: int | None = None
    """Of counts of rows that are sorted by expert, how many rows each of the source has: who gets
    a range of them gets the counts of that range."""

    @property
    def parts(self) -> tuple[int, int]:
        """Into how many parts the source and the target divide the value."""
        return len(self.source) // self.replicas[0], len(self.target) // self.replicas[1]


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication of all members of a group; several groups may do the same side by side."""

    kind: CollectiveKind
    groups: tuple[Group, ...]
    rows: int | None = None
    """Of an all_to_all by counts that are known when it runs, the rows that a device has room for;
    None if all parts are equal."""
    padded: bool = False
    """Of one by counts, whether as much is sent as there is room for, so that no host must know
    the counts."""
    runs: int = 1
    """Of rows sorted by expert, or their counts: of how many sorted ranges (runs) those of a member
    may be, because a group of another size sorted them."""


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer on one bucket of parameters."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Add:
    """What one chunk gives to the gradient of a value is added to what later chunks gave."""

    value: int
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Select:
    """Each member of a group takes its own part of what all of them have."""

    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A device's share of the parameters and of the optimizer's state of one bucket, copied on the
    host for a checkpoint."""

    bucket: int
    nbytes: int
    """What one device copies."""


Op = Compute | Transfer | Collective | Update | Add | Select | Copy


@dataclass(frozen=True, slots=True)
class SendRule:
    """On which stream a group sends what other groups read."""

    stream: str
    made_by: int


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of work: what it is, where it runs, what it reads, makes and waits for."""

    op: Op
    tags: Tags
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    devices: Group = ()
    """Empty until placed."""
    mesh: Mesh | None = None
    """Its devices with named axes, if they were placed so."""
    replicas: int = 1
    """How many neighbours among the devices have the same rows and compute the same."""
    stream: str = COMPUTE
    after: tuple[int, ...] = ()
    """Nodes that must be done before, besides those whose values it reads."""
    after_by: tuple[int, ...] = ()
    """For each of ``after``, the entry of the DAG's history that asks for it."""
    sends: SendRule = SendRule("p2p", 0)
    """How it sends what other groups read."""
    ordered_by: int = 0
    """The last entry of the DAG's history that ordered it; 0 if none has."""
    made_by: int = 0
    """The entry of the DAG's history that made the node or last changed it."""

    @property
    def parts(self) -> int:
        """Over how many devices the rows of a microbatch are divided."""
        return len(self.devices) // self.replicas

    def replica(self, rank: int) -> Group:
        """Those among whom the rows are divided, member ``rank`` of the devices among them."""
        step = self.replicas
        return self.devices if step == 1 else self.devices[rank % step :: step]

    @property
    def endpoints(self) -> tuple[Group, ...]:
        """The groups that take part: of a message, who sends and who receives."""
        op = self.op
        return (op.source, op.target) if isinstance(op, Transfer) else (self.devices,)

    @property
    def compute(self) -> Compute:
        """The op of a node that computes: before lowering, every node does."""
        assert isinstance(self.op, Compute)
        return self.op


@dataclass(frozen=True, slots=True)
class StateRule:
    """How parameters that several devices hold are kept equal."""

    zero: int
    bucket_bytes: int
    reduce_stream: str
    gather_stream: str
    made_by: int
    within: int | None = None
    """Over how many devices one copy of the state is divided; None for as many as can be."""


@dataclass(frozen=True, slots=True)
class ShardRule:
    """How the experts of a chunk are divided over its group."""

    ways: int
    dim: int
    stream: str
    made_by: int
    stride: int = 1
    """How far apart in the group those are that divide the experts among them."""
    sections: tuple[int, ...] = ()
    """Sizes along ``dim`` that are sharded each for itself, as in a fused weight."""
    axis: str = "ep"
    capacity: float | None = None
    """Of rows sorted by expert, room for how many times a device's own; None for all."""

    def room(self, rows: int) -> int:
        """Into how many rows a device receives, if each has ``rows`` of its own."""
        most = rows * self.ways
        if self.capacity is None:
            return most
        wanted = math.ceil(rows * self.capacity)
        return min(most, self.ways * math.ceil(wanted / self.ways))

    def part(self, rank: int) -> int:
        """Which shard of the experts the member ``rank`` of a group has."""
        return rank // self.stride % self.ways

    def mesh(self, group: Group) -> Mesh:
        """``group`` with the axis ``ep``, along which the experts are sharded."""
        outer = len(group) // (self.ways * self.stride)
        return Mesh(group, outer=outer, ep=self.ways, inner=self.stride)


@dataclass(frozen=True, slots=True)
class TensorRule:
    """How a chunk is sharded along an axis whose devices have the same rows."""

    axis: str
    ways: int
    stride: int
    """How far apart in the group neighbours along the axis are."""
    stream: str
    made_by: int
    parameters: Mapping[str, int | Style]
    """The dimension along which each is sharded, or how; the others are replicated."""
    sequence: int | None = None
    """The dimension along which activations are sharded that would be replicated."""
    split: int | None = None
    """The dimension along which the tensors of the batch are sharded: the sequence."""
    context: ContextAttention | None = None
    """How a sequence that is sharded attends to all of itself."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are reduced, updated and gathered together."""

    parameters: tuple[str, ...]
    groups: tuple[Group, ...]
    """Each group holds equal copies; several groups hold different experts."""
    within: int
    """Over how many neighbours in a group one copy is divided; there are several copies if the
    group has more."""
    rule: StateRule
    sizes: tuple[int, ...]
    """Numbers in each parameter, or in a device's shard of it."""
    offsets: tuple[int, ...]
    """Where each begins in the flat buffer that holds a copy: one after another, or, if they are
    not ``sliced``, each within one of the parts."""
    share: int
    """Numbers in one of the equal parts of that buffer, of which there are ``within``."""
    sliced: bool
    """Whether a parameter may lie in several parts."""
    ways: int
    """Over how many devices the parameters are divided as experts."""
    dim: int
    """The dimension along which they are divided as experts."""
    trained: bool
    dtype: torch.dtype
    gradient: torch.dtype
    """What gradients are summed in; if not ``dtype``, the optimizer has a copy in it."""
    sections: tuple[int, ...] = ()
    """Sizes along ``dim`` that are divided each for itself, as in a fused weight."""
    axis: str = "ep"
    """What the axis along which the groups lie is called."""

    @property
    def elements(self) -> int:
        """Numbers in one of the equal copies."""
        return sum(self.sizes)

    def updated_by(self, rank: int) -> list[str]:
        """The parameters of which member ``rank`` of those that divide a copy updates all or
        some."""
        low = rank * self.share if self.level else 0
        high = low + self.share if self.level else self.share * self.within
        places = zip(self.parameters, self.offsets, self.sizes, strict=True)
        return [name for name, start, size in places if max(low, start) < min(high, start + size)]

    @property
    def level(self) -> int:
        """What is divided: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also
        parameters."""
        return self.rule.zero if self.within > 1 else 0

    @property
    def copies(self) -> int:
        """How many copies a group holds together."""
        return len(self.groups[0]) // self.within

    @property
    def shard_groups(self) -> tuple[Group, ...]:
        """The devices that shard one copy among them."""
        n = self.within
        return tuple(g[i : i + n] for g in self.groups for i in range(0, len(g), n))

    @property
    def replica_groups(self) -> tuple[Group, ...]:
        """The devices that have the same shard of different copies."""
        return tuple(g[i :: self.within] for g in self.groups for i in range(self.within))


class Rest(Enum):
    """A share of a GPU without a number: what the numbers of all streams leave."""

    REST = "rest"

    def __str__(self) -> str:
        return self.value


Sms = int | Rest
"""A share of a GPU's multiprocessors (SMs)."""


@dataclass(frozen=True, slots=True)
class StreamRule:
    """What is asked of a logical stream."""

    priority: int = 0
    sms: Sms | None = None
    """Its share of a GPU; without one it runs on all SMs, also those of others' shares."""


@dataclass(frozen=True)
class Dag:
    """One whole training step over all devices. Nodes are numbered by their place."""

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
    """By chunk, one for each axis."""
    remat: Mapping[int, RematPolicy] = field(default_factory=dict)
    """By chunk, where it is not the model's own policy."""
    streams: Mapping[str, StreamRule] = field(default_factory=dict)
    extra: tuple[Extra, ...] = ()
    """Values that lowering added; their numbers follow those of all microbatches."""
    buckets: tuple[Bucket, ...] = ()

    def text(self, *words: str) -> str:
        """The directives, numbered, then every node on a line. With ``words``, only the lines of
        nodes that contain one of them, such as ``"MB[0]"`` or ``"send"``."""
        from piper.ir.text import text

        return text(self, *words)

    def __str__(self) -> str:
        return self.text()

    @cached_property
    def first_extra(self) -> int:
        """The number of the first value that lowering added."""
        return self.table.size * (self.microbatches[1] if self.microbatches else 1)

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """For each value that a node makes, that node."""
        return {value: i for i, node in enumerate(self.nodes) for value in node.writes}

    def plain(self, value: int) -> int:
        """The value of the model that a value which lowering added is a form of."""
        while value >= self.first_extra:
            value = self.extra[value - self.first_extra].of
        return value

    def predecessors(self, number: int) -> list[int]:
        """The nodes that must be done before node ``number`` starts."""
        node = self.nodes[number]
        producers = self.producers
        return [*(producers[v] for v in node.reads if v in producers), *node.after]

    @cached_property
    def tag_values(self) -> Mapping[str, frozenset[Tag]]:
        """Every tag that some node has, and its values."""
        found: dict[str, set[Tag]] = {}
        for node in self.nodes:
            for name, tag in node.tags.items():
                found.setdefault(name, set()).add(tag)
        return {name: frozenset(tags) for name, tags in found.items()}

    def shard(self, chunk: int, parameter: str) -> ShardRule | None:
        """How a parameter of a chunk is sharded, as one of experts or by tensor parallelism."""
        if (experts := self.shards.get(chunk)) is not None:
            return experts
        for segment in self.model.chunks[chunk].segments:
            if (found := segment.parameters.get(parameter)) is not None:
                rule = self.rule(chunk, segment.axis)
                return ShardRule(
                    rule.ways,
                    found.dim,
                    rule.stream,
                    rule.made_by,
                    rule.stride,
                    found.sections,
                    rule.axis,
                )
        return None

    def rule(self, chunk: int, axis: str) -> TensorRule:
        """How a chunk is sharded along an axis."""
        return next(rule for rule in self.tensor[chunk] if rule.axis == axis)

    def ways(self, chunk: int, parameter: str) -> int:
        """Over how many devices a parameter of a chunk is sharded."""
        rule = self.shard(chunk, parameter)
        return rule.ways if rule else 1

    def policy(self, chunk: int) -> RematPolicy:
        """How much chunk ``chunk`` recomputes."""
        return self.remat.get(chunk, self.model.remat)

    def with_nodes(self, changed: Mapping[int, Node]) -> Dag:
        """This DAG with some nodes replaced, each in its place."""
        nodes = tuple(changed.get(i, node) for i, node in enumerate(self.nodes))
        return replace(self, nodes=nodes)

    def noted(self, directive: str) -> Dag:
        """This DAG with one more entry in its history: number ``len(self.history)``."""
        return replace(self, history=(*self.history, directive))

    def label(self, entry: int) -> str:
        """An entry of the history in short: its place and its name."""
        return f"{entry}:{self.history[entry].split('(')[0].strip()}"
