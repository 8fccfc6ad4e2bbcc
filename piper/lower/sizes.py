"""How many bytes of each value one device holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from piper.capture.saving import Remat
from piper.ir.dag import Compute, Dag
from piper.ir.facts import Model, PassFacts
from piper.ir.values import ExtraRole, Role, parameters_of

_SCALAR = 8


@dataclass(slots=True)
class Sizes:
    """Sizes for one DAG. ``models`` holds the model's facts at the shapes that a device sees in
    a group of that many; they differ in nothing but sizes and costs."""

    dag: Dag
    models: Mapping[int, Model]
    _groups: dict[int, int] = field(default_factory=dict)
    _known: dict[tuple[object, ...], int] = field(default_factory=dict)
    _first_extra: int = 0

    def __post_init__(self) -> None:
        self._first_extra = self.dag.first_extra
        for node in self.dag.nodes:
            size = len(node.devices)
            for value in node.reads:
                self._groups.setdefault(value, size)
            for value in node.writes:
                self._groups[value] = size

    def nbytes(self, number: int) -> int:
        """Bytes of a value on each device that holds it. All microbatches' values are alike."""
        if number < self._first_extra:
            key: tuple[object, ...] = (number % self.dag.table.size, self._groups.get(number, 1))
        else:
            extra = self.dag.extra[number - self._first_extra]
            of = extra.of
            if extra.role in _FORMS:
                of = self._plain(of) % self.dag.table.size
            key = (extra.role, of, len(extra.devices))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._nbytes(number)
        return found

    def given(self, number: int, group: int) -> int:
        """Bytes of a tensor of the batch on each of ``group`` devices that share its rows."""
        return self._of_model(number, group)

    def facts(self, op: Compute, group: int) -> PassFacts:
        """What is known of a pass at the shapes of a group of that many devices."""
        model = self.models.get(group, self.dag.model)
        return model.chunks[op.chunk].variants[self.dag.policy(op.chunk)].passes[op.which]

    def _nbytes(self, number: int) -> int:
        dag = self.dag
        if number >= self._first_extra:
            extra = dag.extra[number - self._first_extra]
            match extra.role:
                case ExtraRole.RECEIVED | ExtraRole.EXCHANGED | ExtraRole.PARTIAL:
                    return self._of_model(self._plain(extra.of), len(extra.devices))
                case ExtraRole.REDUCED:
                    return self.part(extra.of, 1) * self.dag.buckets[extra.of].gradient.itemsize
                case ExtraRole.UPDATED | ExtraRole.NORM:
                    return _SCALAR
                case ExtraRole.TOTAL:
                    return 2 * _SCALAR
                case ExtraRole.GATHERED:
                    bucket = dag.buckets[extra.of]
                    whole = bucket.rule.zero == 3
                    return self.whole(extra.of) * bucket.dtype.itemsize if whole else 0
        return self._of_model(number, self._groups.get(number, 1))

    def whole(self, bucket: int) -> int:
        """Elements of a bucket that a device has whole; a divided one is padded to even parts."""
        return self.part(bucket, 1) * self.holders(bucket, 1)

    def part(self, bucket: int, level: int) -> int:
        """Elements of a device's part of what ZeRO divides from ``level`` on."""
        return -(-self.dag.buckets[bucket].elements // self.holders(bucket, level))

    def state(self, bucket: int) -> int:
        """Bytes of a bucket's parameters that stay on a device between uses."""
        elements = self.part(bucket, 3) if self._level(bucket) == 3 else self.whole(bucket)
        return elements * self.dag.buckets[bucket].dtype.itemsize

    def optimizer(self, bucket: int, per_byte: float) -> int:
        """Bytes of a bucket's optimizer state on a device, ``per_byte`` of what is updated, and
        that itself where the parameters are a copy of it."""
        found = self.dag.buckets[bucket]
        updated = self.part(bucket, 1) * found.gradient.itemsize
        return int(updated * (per_byte * found.trained + (found.gradient != found.dtype)))

    def holders(self, bucket: int, level: int) -> int:
        """Over how many devices that is divided which ZeRO divides from ``level`` on."""
        found = self.dag.buckets[bucket]
        needed = level if found.trained else 3  # what is never updated is divided as a whole only
        return len(found.groups[0]) if found.rule.zero >= needed else 1

    def _level(self, bucket: int) -> int:
        return self.dag.buckets[bucket].rule.zero

    def _plain(self, number: int) -> int:
        while number >= self._first_extra:
            number = self.dag.extra[number - self._first_extra].of
        return number

    def _of_model(self, number: int, group: int) -> int:
        value, _ = self.dag.table.value(number)
        model = self.models.get(group, self.dag.model)
        policy: Remat = self.dag.policy(value.of)
        match value.role:
            case Role.SAVED:
                return model.chunks[value.of].variants[policy].saved_bytes
            case Role.HANDOFF:
                return model.chunks[value.of].variants[policy].handoff_bytes
            case Role.PARAMETER_GRADIENT | Role.TIED_GRADIENT:
                chunk = model.chunks[value.of]
                shard = self.dag.shards.get(value.of)
                own, tied = parameters_of(model, chunk, self.dag.table.ties)
                names = tied if value.role is Role.TIED_GRADIENT else own
                parameters = [model.parameters[name] for name in names]
                nbytes = sum(math.prod(p.shape) * p.gradient.itemsize for p in parameters)
                return nbytes // (shard.ways if shard else 1)
            case _:
                return model.values[value.of].nbytes


_FORMS = (ExtraRole.RECEIVED, ExtraRole.EXCHANGED, ExtraRole.PARTIAL)
