"""``lower`` runs the lowering passes in order: a placed DAG enters, verified plans leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec import structs

from piper.cost.fallback import Fallback
from piper.cost.rough_costs import Costs
from piper.cost.tasks import CostModel, Durations, Tasks
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import Model
from piper.ir.dag.sizes import Sizes
from piper.ir.dag.verify_dag import verify
from piper.ir.ops import Group
from piper.ir.plan.issue_order import IssueOrder
from piper.ir.plan.lowered import Lowered
from piper.ir.plan.rank_classes import RankClasses, rank_classes
from piper.ir.plan.verify_plans import verify_plans
from piper.ir.rules import OptimizerCost
from piper.lower.communication.activations import add_activations
from piper.lower.communication.gradient_sums import add_up
from piper.lower.communication.redistributions import add_redistributions
from piper.lower.communication.scalar_reductions import add_scalar_reductions
from piper.lower.communication.ties import tie_gradients
from piper.lower.plans.list_schedule import schedule
from piper.lower.plans.memory_limit import check_limit
from piper.lower.plans.memory_model import memory_of
from piper.lower.plans.planning import plans_of
from piper.lower.state.buckets import add_state
from piper.lower.state.buffers import keep_buffers
from piper.lower.state.whole_step import step_at_once
from piper.lower.state.zero3 import AHEAD, add_gathers

_AHEAD_WITHIN_LIMIT = (8, 4, AHEAD, 1)
"""Prefetch distances of ZeRO-3 gathers to try under a memory limit, in this order."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Inputs of lowering besides the DAG."""

    clip: bool = False
    """Whether updates wait for the global gradient norm, to clip gradients or skip the update."""
    optimizer: OptimizerCost = field(default_factory=OptimizerCost)
    memory_limit: int | None = None
    """Bytes of memory per device."""
    gpu: bool = False
    """Whether devices are GPUs: their streams run asynchronously to each other and to the host."""
    fused: bool = False
    """Whether a compiler fuses operations, which reduces memory traffic."""
    costs: CostModel = field(default_factory=Costs)
    """Orders the nodes whose order the strategy leaves open."""


class _Run(NamedTuple):
    classes: RankClasses
    order: IssueOrder
    sizes: Sizes


def lower(
    dag: Dag,
    models: Mapping[int, Model],
    settings: Settings | None = None,
    training: Dag | None = None,
    *,
    proven: bool = True,
) -> Lowered:
    """Plans for ``dag``, whose nodes are all placed. ``models`` holds the model's facts at the
    shapes of each group size. If ``dag`` is an evaluation, it uses the state of ``training``, a
    lowered step. Unless ``proven``, the plans are for an estimate, and are not verified."""
    settings = settings or Settings()
    dag = add_up(keep_buffers(_shared_groups(dag), training))
    dag = tie_gradients(add_activations(add_redistributions(dag), models, gpu=settings.gpu))
    known = training.buckets if training else ()
    dag = add_state(dag, known, settings.optimizer.tensors)
    if settings.optimizer.whole:
        dag = step_at_once(dag)
    dag = add_scalar_reductions(dag, clip=settings.clip)
    verify(dag)
    if all(bucket.level < 3 for bucket in dag.buckets):
        lowered = _planned(dag, models, settings, proven)
    else:
        lowered = _gathering(dag, models, settings, proven)
    if settings.memory_limit is not None:
        for plan, memory in zip(lowered.plans, lowered.memory, strict=True):
            check_limit(lowered.dag, memory, plan, settings.memory_limit)
    return lowered


def _gathering(dag: Dag, models: Mapping[int, Model], settings: Settings, proven: bool) -> Lowered:
    """Plans that gather ZeRO-3 parameters as early as the memory limit allows."""
    order = _run(dag, models, settings).order
    limit = settings.memory_limit
    tries = [(AHEAD, True)]
    if limit is not None:
        tries = [(ahead, stages) for stages in (True, False) for ahead in _AHEAD_WITHIN_LIMIT]
    for ahead, stages in tries:
        gathered = add_gathers(dag, order, ahead, stages=stages)
        if proven:
            verify(gathered)
        lowered = _planned(gathered, models, settings, proven)
        if limit is None or all(memory.peak <= limit for memory in lowered.memory):
            break
    return lowered


def _planned(dag: Dag, models: Mapping[int, Model], settings: Settings, proven: bool) -> Lowered:
    classes, order, sizes = _run(dag, models, settings)
    plans = plans_of(dag, classes, order, sizes, settings.optimizer, gpu=settings.gpu)
    if proven:
        verify_plans(dag, classes, plans)
    memory = tuple(memory_of(dag, plan, sizes, settings.optimizer) for plan in plans)
    return Lowered(dag, classes, order, plans, memory)


def _shared_groups(dag: Dag) -> Dag:
    """``dag`` with equal groups as one object: for speed, passes compare groups by identity."""
    places, groups = dag.operations.places, [group for group, _ in dag.operations.groups]
    first: dict[Group, Group] = {}
    shared = [first.setdefault(group, group) for group in groups]
    other = np.array([one is not group for one, group in zip(shared, groups, strict=True)], bool)
    changed = {
        number: structs.replace(dag.nodes[number], devices=shared[places[number]])
        for number in np.flatnonzero(other[places]).tolist()
    }
    return dag.with_nodes(changed) if changed else dag


def _run(dag: Dag, models: Mapping[int, Model], settings: Settings) -> _Run:
    """Schedules ``dag`` in simulated time. Default costs replace those unknown to the settings."""
    sizes, classes = Sizes(dag, models), rank_classes(dag)
    tasks = Tasks(dag, sizes, fused=settings.fused, optimizer=settings.optimizer.state)
    order = schedule(dag, classes, Durations(tasks, Fallback(settings.costs, Costs())).of)
    return _Run(classes, order, sizes)
