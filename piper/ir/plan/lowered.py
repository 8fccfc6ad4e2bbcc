"""A lowered step: its DAG, its plans and their peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import Model
from piper.ir.plan.issue_order import IssueOrder
from piper.ir.plan.memory import Memory
from piper.ir.plan.plan import Plan
from piper.ir.plan.rank_classes import RankClasses
from piper.ir.rules import OptimizerCost, StreamRule


@dataclass(frozen=True, slots=True)
class Lowered:
    """The result of lowering."""

    dag: Dag
    classes: RankClasses
    schedule: IssueOrder
    plans: tuple[Plan, ...]
    memory: tuple[Memory, ...]


@dataclass(frozen=True, slots=True)
class LoweredStep:
    """A lowered step with everything that the simulator and the views read from a program."""

    dag: Dag
    models: Mapping[int, Model]
    """The model's facts by group size, with the shapes of that size."""
    plans: tuple[Plan, ...]
    memory: tuple[Memory, ...]
    streams: Mapping[str, StreamRule]
    stages: tuple[str, ...]
    """The tags that partitions made."""
    tokens: int
    """Elements of the first input of the batch."""
    fused: bool
    """Whether the operations are compiled and fused."""
    optimizer: OptimizerCost

    @property
    def devices(self) -> tuple[int, ...]:
        """Every device that takes part."""
        return tuple(sorted(d for plan in self.plans for d in plan.devices))
