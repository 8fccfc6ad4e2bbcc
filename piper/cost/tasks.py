"""The durations of nodes: many nodes map to few distinct tasks, and a cost model times the tasks.

A ``CostModel`` gives the seconds of a ``Task``. The scheduler and the simulator ask it through
``Durations``. ``Costs`` is a model of three figures, ``Cluster`` one of devices and links, and
``Recorded`` one of measured times; ``Fallback`` (fallback.py) puts one before another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from piper.base.errors import PiperError
from piper.ir.collectives import Move
from piper.ir.dag.dag import Dag, Node, region_of
from piper.ir.dag.facts import Model, OpCost
from piper.ir.dag.sizes import Sizes
from piper.ir.equal_numbers import EqualNumbers
from piper.ir.ops import Add, Collective, Compute, Copy, Group, Select, Transfer, Update
from piper.ir.passes import Pass, RematPolicy
from piper.ir.plan.instances import instance_size, instances, members


class TaskKind(Enum):
    """The kinds of tasks other than collectives."""

    PASS = "pass"
    UPDATE = "update"
    ADD = "add"
    SEND = "send"
    COPY = "copy"
    """To the host."""


@dataclass(frozen=True, slots=True)
class Work:
    """A pass of a chunk on one device."""

    chunk: int
    region: str
    which: Pass
    rows: int
    """Rows of the batch."""
    ways: int
    """The expert parallel size."""
    remat: RematPolicy


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one device in a node: everything that its time depends on."""

    kind: TaskKind | Move
    kernels: tuple[OpCost, ...] = ()
    """The operations of a pass, an update or an addition."""
    nbytes: int = 0
    """Bytes of an update, an addition, a copy or a communication: for a reduction its input, for a
    gather its output."""
    members: int = 1
    """The number of devices in one instance of a communication."""
    work: Work | None = None
    """The pass, if it is one."""
    dtype: torch.dtype = torch.float32
    """The dtype of matrix products."""

    @property
    def flops(self) -> int:
        """FLOPs of all operations."""
        return sum(kernel.count * kernel.flops for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """How many operations the host starts."""
        return sum(kernel.count for kernel in self.kernels) or 1


@runtime_checkable
class CostModel(Protocol):
    """Predicts the seconds of tasks."""

    def duration(self, task: Task, devices: Group) -> float | None:
        """Seconds of ``task``: a pass or an update on the slowest of ``devices``, a communication
        among all of them; None if unknown."""
        ...


class Tasks:
    """The tasks of a DAG; equal ones are one object."""

    def __init__(
        self, dag: Dag, sizes: Sizes, *, fused: bool = False, optimizer: float = 0.0
    ) -> None:
        """``fused``: whether a compiler fuses operations. ``optimizer``: bytes of optimizer state
        for each byte that it updates."""
        self._dag, self._sizes, self._fused, self._optimizer = dag, sizes, fused, optimizer
        self._dtype = computed_in(dag.model)
        self._known: dict[tuple[object, ...], Task] = {}

    def of(self, node: Node) -> Task:
        key: tuple[object, ...]
        make: Callable[[], Task]
        match node.op:
            case Compute(chunk=chunk, which=which) as op:
                key, make = (chunk, which, node.parts), partial(self._pass, op, node.parts)
            case Update(bucket=bucket):
                key, make = (bucket,), partial(self._update, bucket)
            case Add() | Select():
                nbytes = self._sizes.copied_by(node)
                key = TaskKind.ADD, nbytes
                kernels = (OpCost(1, 0, nbytes),)
                make = partial(Task, TaskKind.ADD, kernels, nbytes)
            case Copy(nbytes=nbytes):
                key, make = (TaskKind.COPY, nbytes), partial(Task, TaskKind.COPY, nbytes=nbytes)
            case Transfer() | Collective() as op:
                kind = op.kind if isinstance(op, Collective) else TaskKind.SEND
                members, nbytes = instance_size(op), self._sizes.moved(node)
                key = kind, members, nbytes
                make = partial(Task, kind, nbytes=nbytes, members=members)
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _pass(self, op: Compute, parts: int) -> Task:
        dag, facts = self._dag, self._sizes.facts(op, parts)
        rows = dag.model.batch // (parts * (dag.microbatches[1] if dag.microbatches else 1))
        shard = dag.shards.get(op.chunk)
        ways = shard.ways if shard else 1
        region, remat = region_of(dag, op.chunk), dag.policy(op.chunk)
        return Task(
            TaskKind.PASS,
            facts.cost.fused if self._fused else facts.cost.each,
            work=Work(op.chunk, region, op.which, rows, ways, remat),
            dtype=self._dtype,
        )

    def _update(self, bucket: int) -> Task:
        updated = self._sizes.part(bucket, 1) * self._dag.buckets[bucket].gradient.itemsize
        # reads gradients, parameters and state; writes parameters and state
        traffic = int(updated * (3 + 2 * self._optimizer))
        return Task(TaskKind.UPDATE, (OpCost(1, 0, traffic),), updated, dtype=self._dtype)


class Durations:
    """The durations of a DAG's nodes, by a model that knows all its tasks. The model is asked once
    per task and group of devices."""

    def __init__(self, tasks: Tasks, model: CostModel) -> None:
        self._tasks, self._model = tasks, model
        self._nodes: dict[tuple[int, ...], float] = {}
        self._known: dict[tuple[int, Group], float] = {}
        self._numbers: EqualNumbers[Group | tuple[Group, ...] | Task] = EqualNumbers()
        self._members: dict[tuple[int, ...], tuple[Group, ...]] = {}

    def of(self, node: Node) -> float:
        """Seconds until ``node`` is done on all its devices."""
        op, task, number = node.op, self._tasks.of(node), self._numbers.of
        match op:
            case Transfer(source=source, target=target, replicas=replicas):
                where: tuple[int, ...] = number(source), number(target), *replicas
            case Collective(groups=groups):
                where = (number(groups),)
            case _:
                where = (number(node.devices),)
        key = number(task), *where
        seconds = self._nodes.get(key)
        if seconds is None:
            if not isinstance(op, Transfer | Collective):
                seconds = self._ask(task, node.devices)
            else:
                if where not in self._members:
                    self._members[where] = tuple(map(members, instances(op)))
                seconds = max(self._ask(task, group) for group in self._members[where])
            self._nodes[key] = seconds
        return seconds

    def on(self, node: Node, devices: Group) -> float:
        """Seconds of ``node`` on some of its devices: one device, or one instance of a
        communication."""
        task = self._tasks.of(node)
        key = self._numbers.of(task), devices
        if key not in self._known:
            self._known[key] = self._ask(task, devices)
        return self._known[key]

    def _ask(self, task: Task, devices: Group) -> float:
        seconds = self._model.duration(task, devices)
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise PiperError(
                f"{self._model} says that {task} takes {seconds!r}: a cost model returns seconds, "
                "at least 0, or None if it does not know"
            )
        return seconds


def computed_in(model: Model) -> torch.dtype:
    """The dtype of matrix products: the most frequent dtype of the parameters."""
    floats = [p.dtype for p in model.parameters.values() if p.dtype.is_floating_point]
    return max(dict.fromkeys(floats), key=floats.count) if floats else torch.float32
