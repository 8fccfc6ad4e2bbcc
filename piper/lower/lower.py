"""``lower``: the passes in order, from a placed DAG to checked plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from piper.base.codec import written_as
from piper.cost.answers import Answers
from piper.cost.rough_costs import Costs
from piper.cost.tasks import CostModel, Durations, Fallback, Tasks
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
"""How far ahead gathers may be tried to begin where memory is limited."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What lowering must know besides the DAG."""

    clip: bool = False
    """Whether updates wait for the norm of all gradients, to be clipped or left out by it."""
    optimizer: OptimizerCost = field(default_factory=OptimizerCost)
    memory_limit: int | None = None
    """Bytes that a device has."""
    gpu: bool = False
    """Whether the devices are GPUs, whose streams run apart from each other and from the host."""
    fused: bool = False
    """Whether a compiler fuses operations, which then move less through memory."""
    costs: CostModel = field(default_factory=Costs, metadata=written_as(Costs | Answers))
    """By what nodes are ordered that a strategy leaves open."""


class _Run(NamedTuple):
    classes: RankClasses
    order: IssueOrder
    sizes: Sizes


def lower(
    dag: Dag,
    models: Mapping[int, Model],
    settings: Settings | None = None,
    training: Dag | None = None,
) -> Lowered:
    """Plans for ``dag``, whose nodes are all placed. ``models`` are the model's facts at the
    shapes of each size of group. If ``dag`` is an evaluation, ``training`` is the lowered step
    whose state it uses."""
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
        found = _planned(dag, models, settings)
    else:
        found = _gathering(dag, models, settings)
    if settings.memory_limit is not None:
        for plan, memory in zip(found.plans, found.memory, strict=True):
            check_limit(found.dag, memory, plan, settings.memory_limit)
    return found


def _gathering(dag: Dag, models: Mapping[int, Model], settings: Settings) -> Lowered:
    """Plans that gather divided parameters as early as the limit allows."""
    order = _run(dag, models, settings).order
    limit = settings.memory_limit
    tries = [(AHEAD, True)]
    if limit is not None:
        tries = [(ahead, stages) for stages in (True, False) for ahead in _AHEAD_WITHIN_LIMIT]
    for ahead, stages in tries:
        gathered = add_gathers(dag, order, ahead, stages=stages)
        verify(gathered)
        found = _planned(gathered, models, settings)
        if limit is None or all(memory.peak <= limit for memory in found.memory):
            break
    return found


def _planned(dag: Dag, models: Mapping[int, Model], settings: Settings) -> Lowered:
    classes, order, sizes = _run(dag, models, settings)
    plans = plans_of(dag, classes, order, sizes, whole=settings.optimizer.whole)
    verify_plans(dag, classes, plans)
    memory = tuple(
        memory_of(dag, plan, sizes, settings.optimizer, apart=settings.gpu) for plan in plans
    )
    return Lowered(dag, classes, order, plans, memory)


def _shared_groups(dag: Dag) -> Dag:
    """``dag`` where equal groups are one object: passes tell them apart by identity, for speed."""
    first: dict[Group, Group] = {}
    known: dict[int, Group] = {}
    changed = {}
    for number, node in enumerate(dag.nodes):
        group = known.get(id(node.devices))
        if group is None:
            group = known[id(node.devices)] = first.setdefault(node.devices, node.devices)
        if group is not node.devices:
            changed[number] = replace(node, devices=group)
    return dag.with_nodes(changed) if changed else dag


def _run(dag: Dag, models: Mapping[int, Model], settings: Settings) -> _Run:
    """``dag`` run in simulated time; what ``costs`` do not know takes as long as usual."""
    sizes = Sizes(dag, models)
    classes = rank_classes(dag)
    tasks = Tasks(dag, sizes, fused=settings.fused, optimizer=settings.optimizer.state)
    order = schedule(dag, classes, Durations(tasks, Fallback(settings.costs, Costs())).of)
    return _Run(classes, order, sizes)
