"""The slots that are filled before the step begins: tensors of the batch, and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from piper.base.errors import DirectiveError
from piper.ir.dag.dag import name_of
from piper.ir.dag.values import Role
from piper.ir.ops import Group, same_group
from piper.ir.plan.instructions import Given, MemoryKind, RowShards, Seed, Slot
from piper.lower.plans.plan_context import PlanContext


class StepInputs:
    """The inputs of one rank class; ``new`` makes the slot of a value."""

    def __init__(
        self, shared: PlanContext, members: Group, new: Callable[[int, Slot], int]
    ) -> None:
        self._shared, self._dag = shared, shared.dag
        self._members = members
        self._new = new
        self._rows: dict[int, RowShards] = {}
        self._seeds: dict[tuple[int, int], tuple[int, Seed]] = {}
        self.given: list[Given] = []
        self.same: dict[int, int] = {}
        """For a seed equal to that of another microbatch, the latter."""

    @property
    def seeds(self) -> tuple[Seed, ...]:
        return tuple(seed for _, seed in self._seeds.values())

    def add(self, numbers: Iterable[int]) -> None:
        """Make the slots that the computations ``numbers`` read."""
        for number in numbers:
            node = self._dag.nodes[number]
            for value in node.reads:
                role = self._dag.role(value)
                if role is Role.BATCH:
                    self._tensor(value, number, self._shared.rows(node))
                elif role is Role.SEED:
                    self._seed(value, node.parts)

    def _tensor(self, value: int, number: int, rows: RowShards) -> None:
        if value not in self._rows:
            self._rows[value] = rows
            template, microbatch = self._dag.table.value(value)
            slot = self._slot(value, rows.parts)
            self.given.append(Given(slot, template.of, microbatch, rows))
        elif not self._same_rows(self._rows[value], rows):
            self._refuse_two_parts(value, number, self._rows[value])

    def _seed(self, value: int, size: int) -> None:
        of = self._dag.table.value(value)[0].of
        if (of, size) in self._seeds:
            self.same[value] = self._seeds[of, size][0]
            return
        microbatches = self._dag.microbatches[1] if self._dag.microbatches else 1
        parts = 1 if self._dag.model.count is not None else microbatches * size
        self._seeds[of, size] = value, Seed(self._slot(value, size), of, size, parts)

    def _slot(self, value: int, parts: int) -> int:
        nbytes = self._shared.sizes.given(value, parts)
        return self._new(value, self._shared.held(MemoryKind.BATCH, nbytes))

    def _same_rows(self, one: RowShards, other: RowShards) -> bool:
        """Whether every device of the class has the same rows of both."""
        if same_group(one.devices, other.devices) and one.copies == other.copies:
            return True
        return all(one.sharing(device) == other.sharing(device) for device in self._members)

    def _refuse_two_parts(self, value: int, number: int, rows: RowShards) -> None:
        name = self._dag.model.values[self._dag.table.value(value)[0].of].name
        node, mine = self._dag.nodes[number], self._members[0]
        others = list(rows.sharing(mine))
        raise DirectiveError(
            f"{name_of(self._dag, number)} reads {name} on {list(node.devices)}, but another "
            f"region on device {mine} reads it as one of {others}: a device can take one part of "
            f"a microbatch only; place both on the same devices "
            f"({self._dag.history[node.sends.made_by]})"
        )
