"""Data shared by the plans of all rank equivalence classes: node names, slots, and which values
accumulate in one slot."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

import numpy as np

from piper.ir.dag.dag import Dag, Node, named
from piper.ir.dag.ragged import Ragged
from piper.ir.dag.sizes import Sizes
from piper.ir.dag.values import PARAMETER_GRADIENTS, Content, Role
from piper.ir.ops import Add, Compute, Group, Select, Transfer, Update
from piper.ir.passes import Kind, Ref
from piper.ir.plan.instructions import MemoryKind, RowShards, Slot, Verb
from piper.ir.plan.rank_classes import RankClasses
from piper.ir.rules import OptimizerCost
from piper.ir.shards import RANK

_HOLDERS = {
    Role.BATCH: MemoryKind.BATCH,
    Role.SEED: MemoryKind.BATCH,
    Role.ACTIVATION: MemoryKind.ACTIVATIONS,
    Role.GRADIENT: MemoryKind.ACTIVATIONS,
    Role.SAVED: MemoryKind.SAVED,
    Role.SAVED_FOR_BW: MemoryKind.SAVED,
    Role.BI_SAVED: MemoryKind.SAVED,
}


class Touched:
    """The rank classes of a group, cached by the group's identity. Groups are shared objects, and
    comparing a thousand devices each time would take most of the time."""

    def __init__(self, classes: RankClasses) -> None:
        self.classes = classes
        self._known: dict[int, tuple[int, ...]] = {}
        self._kept: list[Group] = []

    def by(self, group: Group) -> tuple[int, ...]:
        classes = self._known.get(id(group))
        if classes is None:
            classes = self._known[id(group)] = self.classes.touched(group)
            self._kept.append(group)
        return classes


class PlanContext:
    """Data shared by the plans of all rank classes."""

    def __init__(
        self, dag: Dag, sizes: Sizes, touched: Touched, optimizer: OptimizerCost, gpu: bool
    ) -> None:
        self.dag = dag
        self.sizes = sizes
        self.touched = touched
        self.optimizer = optimizer
        self.gpu = gpu
        self.sums = _sums(dag)
        """For each value that accumulates with others in one slot, the first of them."""
        leaders = np.arange(dag.first_extra + len(dag.extra))
        leaders[list(self.sums)] = list(self.sums.values())
        self._first_buffer = len(leaders)
        self.numbered = len(leaders) + len(dag.extra)
        """The number of values and possible buffers."""
        edges, nothing = dag.edges, Ragged.of([()])
        self.reads = edges.reads.then(nothing)
        """The values that each node reads; then an empty row."""
        self.writes = edges.writes.with_items(leaders[edges.writes.items]).then(nothing)
        """The values that each node makes, or the first of their sums; then an empty row."""
        self.after = edges.after
        self._names: dict[int, str] = {}
        self._axes: dict[int, tuple[tuple[str, int, int], ...]] = {}
        self._first_extra = dag.first_extra
        self._rows: dict[tuple[int, int], RowShards] = {}
        self._slots: dict[tuple[MemoryKind, int, int | None], Slot] = {}

    def buffer(self, made: int) -> int:
        """The number of the gradient accumulation buffer of the reduction that makes a value: it
        differs from every value."""
        return self._first_buffer + made - self._first_extra

    def rows(self, node: Node) -> RowShards:
        """The devices that shard the rows of a node's computation. Equal ones are one object."""
        key = id(node.devices), node.replicas  # the DAG holds the devices
        if key not in self._rows:
            self._rows[key] = RowShards(node.devices, node.replicas)
        return self._rows[key]

    def slot(self, verb: Verb, value: int) -> Slot:
        """The slot into which an instruction writes ``value``. Not for parameter gradients."""
        bucket = None
        holder = MemoryKind.COMMUNICATION
        if value >= self._first_extra:
            extra = self.dag.extra[value - self._first_extra]
            if extra.content in (Content.GRADIENTS, Content.PARAMETERS):
                bucket = extra.of
            if extra.content is Content.GRADIENTS:
                holder = MemoryKind.GRADIENTS
            elif verb is Verb.ADD:
                holder = MemoryKind.ACTIVATIONS
        elif verb is Verb.COMPUTE:
            holder = _HOLDERS[self.dag.table.roles[value % self.dag.table.size]]
        return self.held(holder, self.sizes.nbytes(value), bucket)

    def held(self, holder: MemoryKind, nbytes: int, bucket: int | None = None) -> Slot:
        key = holder, nbytes, bucket
        if key not in self._slots:
            self._slots[key] = Slot(holder, nbytes, nbytes, bucket)
        return self._slots[key]

    @cached_property
    def largest_loss(self) -> int:
        """The largest number of devices over which the rows of a loss are sharded."""
        losses = self.dag.activations(self.dag.model.loss)
        return max(self.dag.source(value).parts for value in losses)

    def name(self, number: int, words: tuple[str, str]) -> str:
        """The name of a node whose kind has these ``words``."""
        text = self._names.get(number)
        if text is None:
            first, last = words
            text = self._names[number] = named(first, self.dag.nodes[number].tags, last)
        return text

    def axes(self, chunk: int) -> tuple[tuple[str, int, int], ...]:
        """The axes that shard a chunk, if its passes depend on a device's rank along them."""
        if chunk not in self._axes:
            names = self.dag.model.chunks[chunk].buffers
            axes = [name.removeprefix(RANK) for name in names if name.startswith(RANK)]
            rules = [self.dag.rule(chunk, axis) for axis in axes]
            self._axes[chunk] = tuple((rule.axis, rule.stride, rule.ways) for rule in rules)
        return self._axes[chunk]

    def private(self, value: int) -> bool:
        """Whether an activation or gradient is contiguous and shares its memory with no other."""
        maker = self.dag.source(value)
        if self.sizes.copied(value):
            return False
        if isinstance(maker.op, Add):
            return True
        if not isinstance(maker.op, Compute):
            return False
        chunk, of = self.dag.model.chunks[maker.op.chunk], self.dag.table.value(value)[0]
        if of.role is Role.GRADIENT:
            ref = Ref(Kind.INPUT_GRAD, chunk.inputs.index(of.of), of.term)
        else:
            ref = Ref(Kind.OUTPUT, chunk.outputs.index(of.of))
        return ref in self.sizes.facts(maker.op, maker.parts).private

    def about(self, node: Node) -> tuple[Content | None, int]:
        """What a communication moves, and the node's model value or bucket."""
        match node.op:
            case Compute() | Add() | Select():
                return None, 0
            case Update(bucket=bucket):
                return None, bucket
        (written,) = node.writes
        content = self.content(written)
        if content is Content.VALUE:
            return content, self.dag.table.value(self.dag.plain(written))[0].of
        return content, self.dag.extra[written - self._first_extra].of

    def content(self, value: int) -> Content:
        """The content of a value; all values of the model are of one kind."""
        if value < self._first_extra:
            return Content.VALUE
        return self.dag.extra[value - self._first_extra].content


def _sums(dag: Dag) -> dict[int, int]:
    """For each value that accumulates with others in one slot, the first of them.

    Gradients of one chunk, and reductions of one bucket, accumulate over microbatches, unless a
    node reads those of a single microbatch.
    """
    together: dict[object, list[int]] = {}
    apart: set[object] = set()
    for node in dag.examples:  # those of interest are alone in their kinds
        if isinstance(node.op, Compute | Transfer) or _moves_value(dag, node):
            continue  # a pass adds a gradient that it reads to its own: it is in no list here
        read: defaultdict[object, list[int]] = defaultdict(list)
        for value in node.reads:
            kind = _kind(dag, value)
            if kind is not None:
                read[kind].append(value)
        for kind, values in read.items():
            if together.setdefault(kind, values) != values:
                apart.add(kind)
    return {
        value: values[0]
        for kind, values in together.items()
        if kind not in apart
        for value in values
    }


def _moves_value(dag: Dag, node: Node) -> bool:
    """Whether a node makes a form of a value of the model."""
    at = node.writes[0] - dag.first_extra
    return at < 0 or dag.extra[at].content is Content.VALUE


def _kind(dag: Dag, value: int) -> object | None:
    """Values of equal kind accumulate: gradients of one chunk, reductions of one bucket."""
    if value >= dag.first_extra:
        extra = dag.extra[value - dag.first_extra]
        return extra if extra.content is Content.GRADIENTS else None
    template = dag.table.value(value)[0]
    return template if template.role in PARAMETER_GRADIENTS else None
