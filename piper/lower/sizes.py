"""How many bytes of each value one device holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from piper.ir.dag import Dag
from piper.ir.facts import Model
from piper.ir.values import ExtraRole, Role


@dataclass(slots=True)
class Sizes:
    """Sizes for one DAG. ``models`` holds the model's facts at the shapes that a device sees in
    a group of that many; they differ in nothing but sizes and costs."""

    dag: Dag
    models: Mapping[int, Model]
    _groups: dict[int, int] = field(default_factory=dict)
    _first_extra: int = 0

    def __post_init__(self) -> None:
        self._first_extra = self.dag.first_extra
        for node in self.dag.nodes:
            for value in (*node.reads, *node.writes):
                self._groups.setdefault(value, len(node.devices))
            for value in node.writes:
                self._groups[value] = len(node.devices)

    def nbytes(self, number: int) -> int:
        """Bytes of a value on each device that holds it."""
        dag = self.dag
        if number >= self._first_extra:
            extra = dag.extra[number - self._first_extra]
            match extra.role:
                case ExtraRole.RECEIVED | ExtraRole.EXCHANGED | ExtraRole.PARTIAL:
                    return self._of_model(self._plain(extra.of), len(extra.devices))
                case ExtraRole.REDUCED:
                    return -(-self.gradients(extra.of) // self._parts(extra.of, 1))
                case ExtraRole.UPDATED:
                    return 0
                case ExtraRole.GATHERED:
                    whole = dag.buckets[extra.of].rule.zero == 3
                    return self.bucket(extra.of) if whole else 0
        return self._of_model(number, self._groups.get(number, 1))

    def bucket(self, index: int) -> int:
        """Bytes of a bucket's parameters on a device that has them whole."""
        bucket = self.dag.buckets[index]
        whole = sum(self.dag.model.parameters[name].nbytes for name in bucket.parameters)
        return whole // bucket.ways

    def state(self, index: int) -> int:
        """Bytes of a bucket's parameters that stay on a device between uses."""
        return -(-self.bucket(index) // self._parts(index, 3))

    def optimizer(self, index: int, per_byte: float) -> int:
        """Bytes of a bucket's optimizer state on a device, ``per_byte`` of trained parameters."""
        return int(-(-self.gradients(index) // self._parts(index, 1)) * per_byte)

    def gradients(self, index: int) -> int:
        """Bytes of a bucket's gradients on a device that has them whole."""
        bucket = self.dag.buckets[index]
        parameters = [self.dag.model.parameters[name] for name in bucket.parameters]
        return sum(p.nbytes for p in parameters if p.trained) // bucket.ways

    def _parts(self, index: int, level: int) -> int:
        bucket = self.dag.buckets[index]
        return len(bucket.groups[0]) if bucket.rule.zero >= level else 1

    def _plain(self, number: int) -> int:
        while number >= self.dag.first_extra:
            number = self.dag.extra[number - self.dag.first_extra].of
        return number

    def _of_model(self, number: int, group: int) -> int:
        value, _ = self.dag.table.value(number)
        model = self.models.get(group, self.dag.model)
        match value.role:
            case Role.SAVED:
                variant = model.chunks[value.of].variants[self.dag.policy(value.of)]
                return variant.saved_bytes
            case Role.HANDOFF:
                return model.chunks[value.of].variants[self.dag.policy(value.of)].handoff_bytes
            case Role.PARAMETER_GRADIENT:
                chunk = model.chunks[value.of]
                shard = self.dag.shards.get(value.of)
                parameters = [model.parameters[name] for name in chunk.parameters]
                trained = sum(p.nbytes for p in parameters if p.trained)
                return trained // (shard.ways if shard else 1)
            case _:
                return model.values[value.of].nbytes
