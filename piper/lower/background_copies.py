"""Adds the copies of a background save to the plans of the next step; the rest stays the same.

Only updates change parameters and optimizer state. So the next step copies each bucket for the
checkpoint before the bucket's update, in pipeline bubbles when they fit. Copies are placed in the
order of the updates. Each begins in the first bubble in which earlier copies leave room. A copy
that fits in no bubble begins in the same bubble as the one before it; without any bubble, copies
begin at the start of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from piper.cost.fallback import Fallback
from piper.cost.rough_costs import Costs
from piper.cost.tasks import Durations, Tasks
from piper.ir.dag.dag import Dag, Node, name_of
from piper.ir.dag.facts import Model
from piper.ir.dag.sizes import Sizes
from piper.ir.ops import COPY, Copy, Update
from piper.ir.plan.instructions import BESIDE, Instruction, Verb
from piper.ir.plan.issue_order import IssueOrder
from piper.ir.plan.lowered import Lowered
from piper.ir.plan.plan import Plan
from piper.ir.plan.verify_plans import verify_plans
from piper.ir.rules import OptimizerCost
from piper.lower.lower import Settings
from piper.lower.plans.memory_model import memory_of


def saving(lowered: Lowered, models: Mapping[int, Model], settings: Settings) -> Lowered:
    """``lowered`` for the step after a save: each device copies every bucket that it updates,
    before the update. The order of all other instructions is the same."""
    dag = with_copies(lowered.dag, Sizes(lowered.dag, models), settings.optimizer)
    sizes = Sizes(dag, models)
    tasks = Tasks(dag, sizes, fused=settings.fused, optimizer=settings.optimizer.state)
    seconds = Durations(tasks, Fallback(settings.costs, Costs())).of
    plans = tuple(saving_plan(dag, lowered.schedule, plan, seconds) for plan in lowered.plans)
    verify_plans(dag, lowered.classes, plans)
    memory = tuple(memory_of(dag, plan, sizes, settings.optimizer) for plan in plans)
    return replace(lowered, dag=dag, plans=plans, memory=memory)


def with_copies(dag: Dag, sizes: Sizes, optimizer: OptimizerCost) -> Dag:
    """``dag`` with a copy of each updated bucket before its update."""
    nodes = list(dag.nodes)
    for number, node in enumerate(dag.nodes):
        if isinstance(node.op, Update):
            bucket = dag.buckets[node.op.bucket]
            updated = sizes.part(node.op.bucket, 1) * bucket.gradient.itemsize
            # replicas share the work: each writes an equal part
            nbytes = int(updated * (1 + optimizer.state)) // bucket.copies
            copy = Node(
                Copy(node.op.bucket, nbytes), {}, (), (), node.devices, stream=COPY,
                made_by=node.made_by,
            )  # fmt: skip
            after = (*node.after, len(nodes))
            nodes[number] = structs.replace(
                node, after=after, after_by=(*node.after_by, node.made_by)
            )
            nodes.append(copy)
    return replace(dag, nodes=tuple(nodes))


class _Bubble(NamedTuple):
    """A time in which a device computes nothing."""

    at: int
    """The instruction before which the device waits."""
    after: int | None
    """The computation before the bubble."""
    seconds: float


def saving_plan(dag: Dag, order: IssueOrder, plan: Plan, seconds: Callable[[Node], float]) -> Plan:
    """``plan`` with the copies of ``dag``. All other nodes run as in ``order``."""
    numbers = {n.op.bucket: i for i, n in enumerate(dag.nodes) if isinstance(n.op, Copy)}
    updates: dict[int, int] = {}
    for pc, x in enumerate(plan.instructions):
        for bucket in _overwritten(x):
            updates.setdefault(bucket, pc)
    lengths = {bucket: seconds(dag.nodes[numbers[bucket]]) for bucket in updates}
    begun: defaultdict[int, list[tuple[int, int | None]]] = defaultdict(list)
    for bucket, bubble in _placed(updates, lengths, _bubbles(plan, order)).items():
        begun[bubble.at].append((bucket, bubble.after))
    moved: dict[int, int] = {}
    """The new program counter of each instruction of ``plan``."""
    copied: dict[int, int] = {}
    """By bucket, the program counter of its copy."""
    waited: set[int] = set()
    instructions: list[Instruction] = []
    for pc, x in enumerate(plan.instructions):
        for bucket, after in begun[pc]:
            copied[bucket] = len(instructions)
            number = numbers[bucket]
            waits = () if after is None else (moved[after],)
            instructions.append(
                Instruction(
                    Verb.COPY, number, name_of(dag, number), COPY, dag.nodes[number].op,
                    of=bucket, waits=waits,
                )
            )  # fmt: skip
        moved[pc] = len(instructions)
        before = [copied[bucket] for bucket in _overwritten(x)]
        instructions.append(
            structs.replace(
                x,
                waits=tuple(sorted([*(moved[w] for w in x.waits), *before])),
                early=None if x.early is None else moved[x.early],
                ends=tuple(
                    sorted([*(moved[w] for w in x.ends), *(w for w in before if w not in waited)])
                ),
            )
        )
        waited.update(before)
    return replace(plan, instructions=tuple(instructions))


def _overwritten(x: Instruction) -> tuple[int, ...]:
    """The buckets whose state an instruction updates."""
    if not isinstance(x.op, Update):
        return ()
    return tuple(dict.fromkeys((x.op.bucket, *x.buckets)))


def _bubbles(plan: Plan, order: IssueOrder) -> list[_Bubble]:
    bubbles: list[_Bubble] = []
    free, last = 0.0, None
    for pc, x in enumerate(plan.instructions):
        if x.verb in BESIDE:
            continue
        start = order.start[x.node]
        if start > free:
            between = range(0 if last is None else last + 1, pc)
            waits = (i for i in between if _blocks(plan.instructions[i]))
            bubbles.append(_Bubble(next(waits, pc), last, start - free))
        free, last = max(free, order.end[x.node]), pc
    return bubbles


def _blocks(x: Instruction) -> bool:
    """Whether the device blocks before it. Sends do not count: other devices wait for them."""
    return bool(x.ends) and x.verb is not Verb.SEND


def _placed(
    updates: Mapping[int, int], lengths: Mapping[int, float], bubbles: list[_Bubble]
) -> dict[int, _Bubble]:
    """The bubble in which the copy of each bucket begins."""
    chosen: dict[int, _Bubble] = {}
    here = _Bubble(0, None, 0.0)
    rest = bubbles[::-1]
    room = 0.0
    for bucket, deadline in sorted(updates.items(), key=lambda item: item[1]):
        while room <= 0 and rest and rest[-1].at <= deadline:
            here = rest.pop()
            room += here.seconds
        chosen[bucket] = here
        room -= lengths[bucket]
    return chosen
