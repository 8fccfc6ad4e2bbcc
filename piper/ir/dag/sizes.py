"""The bytes of each value on one device, from the DAG and the model's facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag, Node
from piper.ir.dag.facts import Model, PassFacts, Stored
from piper.ir.dag.values import Content, Extra, Role, Value
from piper.ir.ops import Collective, Compute
from piper.ir.passes import Kind, Pass, Ref, RematPolicy

_SCALAR = 8


@dataclass(slots=True)
class Sizes:
    """Sizes for one DAG. ``models`` holds the model's facts by group size, with the shapes that one
    device of such a group sees; they differ only in sizes and costs."""

    dag: Dag
    models: Mapping[int, Model]
    _given: dict[int, int] = field(default_factory=dict)
    """For each value that no node makes, the number of parts in which its first reader has it."""
    _known: dict[tuple[object, ...], Stored] = field(default_factory=dict)
    _passes: dict[tuple[int, Pass, int], PassFacts] = field(default_factory=dict)
    _first_extra: int = 0

    def __post_init__(self) -> None:
        self._first_extra = self.dag.first_extra
        edges = self.dag.edges
        given = edges.makers < 0
        pairs = zip(
            edges.reads.items[given].tolist(), edges.reads.row_of[given].tolist(), strict=True
        )
        for value, reader in pairs:
            self._given.setdefault(value, self.dag.nodes[reader].parts)

    def nbytes(self, number: int) -> int:
        """Bytes of a value on each device that holds it; equal for all microbatches."""
        return self._stored(number).nbytes

    def sent(self, number: int) -> int:
        """Bytes of a value in a message: every element, also where expanded rows share memory."""
        return self._stored(number).sent

    def copied(self, number: int) -> int:
        """Bytes of the contiguous copy of a value that a message carries; 0 if there is no copy."""
        return self._stored(number).copied or 0

    def _stored(self, number: int) -> Stored:
        """The storage of a value on each device that holds it."""
        key = self._key(number)
        stored = self._known.get(key)
        if stored is None:
            if number < self._first_extra:
                stored = self._of_model(number, self._parts(number))
            else:
                stored = self._of_extra(self.dag.extra[number - self._first_extra])
            self._known[key] = stored
        return stored

    def _key(self, number: int) -> tuple[object, ...]:
        """What a value's size depends on."""
        if number < self._first_extra:
            return number % self.dag.table.size, self._parts(number)
        extra = self.dag.extra[number - self._first_extra]
        if extra.content is not Content.VALUE:
            return extra.content, extra.of
        of = self.dag.plain(extra.of) % self.dag.table.size
        return extra.layout is None, of, extra.parts, extra.rows, extra.summed

    def _parts(self, number: int) -> int:
        """The number of devices that shard the rows of a value of the model."""
        made = self.dag.maker(number)
        return self._given.get(number, 1) if made is None else self.dag.nodes[made].parts

    def given(self, number: int, group: int) -> int:
        """Bytes of a batch tensor on each of ``group`` devices that shard its rows."""
        return self._of_model(number, group).nbytes

    def facts(self, op: Compute, group: int) -> PassFacts:
        """The facts of a pass at the shapes of a group of ``group`` devices."""
        key = op.chunk, op.which, group
        if key not in self._passes:
            variants = self.models.get(group, self.dag.model).chunks[op.chunk].variants
            self._passes[key] = variants[self.dag.policy(op.chunk)].passes[op.which]
        return self._passes[key]

    def _of_extra(self, extra: Extra) -> Stored:
        match extra.content:
            case Content.VALUE:
                return self._of_form(extra)
            case Content.GRADIENTS:
                gradient = self.dag.buckets[extra.of].gradient
                return Stored(self.part(extra.of, 1) * gradient.itemsize)
            case Content.PARAMETERS:
                bucket = self.dag.buckets[extra.of]
                kept = bucket.level < 3  # the parameters stay whole: nothing is gathered
                return Stored(0 if kept else self.whole(extra.of) * bucket.dtype.itemsize)
            case Content.LOSS:
                return Stored(2 * _SCALAR)
            case Content.LOAD:
                sorted_rows = self.dag.model.chunks[extra.of].sorted_rows
                assert sorted_rows is not None
                return Stored(sorted_rows.experts * _SCALAR)
            case _:
                return Stored(_SCALAR)

    def _of_form(self, extra: Extra) -> Stored:
        plain = self.dag.plain(extra.of)
        own = self._of_model(plain, extra.parts)
        if extra.summed:
            return own.dense
        if extra.rows is not None:
            value, _ = self.dag.table.value(plain)
            rows = self.models.get(extra.parts, self.dag.model).values[value.of].shape[0]
            return Stored(own.sent // rows * extra.rows)
        return own if extra.layout is None else Stored(own.sent)  # contiguous, as it is assembled

    def whole(self, bucket: int) -> int:
        """Elements of a whole bucket; a sharded one is padded to equal parts."""
        return self.part(bucket, 1) * self.shards(bucket, 1)

    def part(self, bucket: int, level: int) -> int:
        """Elements of a device's part of the state that ZeRO shards from ``level`` on."""
        parameters = self.dag.buckets[bucket]
        return parameters.share if self.shards(bucket, level) > 1 else parameters.elements

    def state(self, bucket: int) -> int:
        """Bytes of a bucket's parameters that stay on a device between uses."""
        parameters = self.dag.buckets[bucket]
        elements = self.part(bucket, 3) if parameters.level == 3 else self.whole(bucket)
        return elements * parameters.dtype.itemsize

    def optimizer(self, bucket: int, per_byte: float) -> int:
        """Bytes of a bucket's optimizer state on a device: ``per_byte`` for each updated byte,
        plus the master copy if there is one."""
        parameters = self.dag.buckets[bucket]
        updated = self.part(bucket, 1) * parameters.gradient.itemsize
        master = parameters.gradient != parameters.dtype
        return int(updated * (per_byte * parameters.trained + master))

    def updating(self, bucket: int, per_byte: float, *, together: bool) -> int:
        """Temporary bytes of an update: ``per_byte`` for each byte of the largest parameter on a
        device, or of all parameters if ``together``."""
        parameters = self.dag.buckets[bucket]
        updated = self.part(bucket, 1)
        if not together:
            updated = min(updated, max(parameters.sizes))
        return int(updated * parameters.gradient.itemsize * per_byte)

    def shards(self, bucket: int, level: int) -> int:
        """The number of shards of the state that ZeRO shards from ``level`` on."""
        parameters = self.dag.buckets[bucket]
        return parameters.within if parameters.level >= level else 1

    def moved(self, node: Node) -> int:
        """Bytes of a communication on each device: the input of a reduction, the output of a
        gather; for an all_to_all by counts, the bytes if all devices get equally many rows."""
        (made,) = node.writes
        op = node.op if isinstance(node.op, Collective) else None
        by_count = op is not None and op.rows is not None
        if made < self._first_extra:
            return max(self.nbytes(made), 0 if by_count else self.nbytes(node.reads[0]))
        extra = self.dag.extra[made - self._first_extra]
        match extra.content:
            case Content.VALUE:
                return self.nbytes(extra.of) if by_count else self.sent(made)
            case Content.PARAMETERS:
                return self.whole(extra.of) * self.dag.buckets[extra.of].dtype.itemsize
            case Content.GRADIENTS if op is not None and op.kind is Move.REDUCE_SCATTER:
                return self.whole(extra.of) * self.dag.buckets[extra.of].gradient.itemsize
            case _:
                return self.nbytes(made)

    def copied_by(self, node: Node) -> int:
        """Bytes that an Add or a Select reads and writes, two terms at a time."""
        return max(2, 3 * (len(node.reads) - 1)) * self.nbytes(node.writes[0])

    def _of_model(self, number: int, group: int) -> Stored:
        value, _ = self.dag.table.value(number)
        model = self.models.get(group, self.dag.model)
        policy: RematPolicy = self.dag.policy(value.of)
        match value.role:
            case Role.SAVED:
                return Stored(model.chunks[value.of].variants[policy].saved_bytes)
            case Role.SAVED_FOR_BW:
                return Stored(model.chunks[value.of].variants[policy].saved_for_bw_bytes)
            case Role.BI_SAVED:
                return Stored(model.chunks[value.of].variants[policy].bi_saved_bytes)
            case Role.PARAMETER_GRADIENT | Role.TIED_GRADIENT:
                own, tied = self.dag.table.parameters[value.of]
                names = tied if value.role is Role.TIED_GRADIENT else own
                return Stored(
                    sum(
                        self.dag.numel(value.of, name) * model.parameters[name].gradient.itemsize
                        for name in names
                    )
                )
            case _:
                return self._lying(value, group)

    def _lying(self, value: Value, group: int) -> Stored:
        model = self.models.get(group, self.dag.model)
        facts = model.values[value.of]
        if value.role is Role.GRADIENT:
            chunk = model.chunks[value.by]
            ref = Ref(Kind.INPUT_GRAD, chunk.inputs.index(value.of), value.term)
            return dict(chunk.gradients).get(ref, facts.stored)
        return facts.stored
