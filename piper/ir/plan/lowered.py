"""A lowered step: its DAG, its plans and their memory."""

from __future__ import annotations

from dataclasses import dataclass

from piper.ir.dag.dag import Dag
from piper.ir.plan.issue_order import IssueOrder
from piper.ir.plan.memory import Memory
from piper.ir.plan.plan import Plan
from piper.ir.plan.rank_classes import RankClasses


@dataclass(frozen=True, slots=True)
class Lowered:
    """Everything that lowering found out."""

    dag: Dag
    classes: RankClasses
    schedule: IssueOrder
    plans: tuple[Plan, ...]
    memory: tuple[Memory, ...]
