"""A compiled program as data: the parts that it is made from, and what lowering makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch

from piper.base.errors import PiperError
from piper.base.modes import without_collection
from piper.capture.batch import Batch
from piper.capture.code.codegen import Compiler
from piper.capture.code.executables import Executables
from piper.capture.trace.computation import Computation
from piper.ir.dag.build import build
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import Facts, Model
from piper.ir.ops import Compute
from piper.ir.passes import Pass
from piper.ir.plan.lowered import Lowered, LoweredStep
from piper.ir.plan.memory import Memory
from piper.ir.plan.plan import Plan
from piper.ir.rules import Bucket, StreamRule
from piper.ir.shards import RANK
from piper.ir.tensors import TensorSpec
from piper.lower.forwards import lower_forwards
from piper.lower.lower import Settings
from piper.program.compile.compile_arguments import CompileArguments
from piper.state.optimizer.training import Training
from piper.state.weights.first_tensors import FirstTensor
from piper.state.weights.matching import located
from piper.state.weights.source import Source, StateNames
from piper.state.weights.weight_files import WeightFiles
from piper.strategies.directives.partition import Partition
from piper.strategies.strategy import Strategy


def trained_shapes(model: Model, code: Executables) -> dict[str, tuple[int, ...]]:
    """The full shapes of the parameters that have gradients."""
    trained = (name for name, facts in model.parameters.items() if facts.trained)
    return {name: code.parameters[name].shape for name in trained}


@dataclass(frozen=True)
class Step:
    """The step of a model in training mode, or its forwards in evaluation mode."""

    facts: Facts
    code: Executables
    planned: Callable[[], tuple[Plan, ...]] = field(default=tuple, repr=False, compare=False)
    """Makes ``plans``."""

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """One plan for each rank equivalence class, whose devices are ``plan.devices``. Made when
        they are first asked for: who only trains or simulates needs none for evaluation."""
        return self.planned()

    def plan_of(self, device: int) -> Plan:
        """The plan of one device."""
        for plan in self.plans:
            if device in plan.devices:
                return plan
        devices = sorted(d for plan in self.plans for d in plan.devices)
        raise PiperError(f"the program has no device {device}; it runs on {devices}")


def evaluated(
    step: Step, training: Step, lowered: Lowered, strategy: Strategy, settings: Settings
) -> tuple[Step, tuple[Bucket, ...]]:
    """``step``, which is that of evaluation, with its plans, and the buckets of both modes.
    ``lowered`` is the step of ``training``. If the modes differ, the strategy may not fit, and
    there may be other parameters: then the plans are made now."""

    def forwards() -> Lowered:
        with without_collection():
            placed = strategy.apply(build(step.facts.whole))
            return lower_forwards(placed, step.facts.models, settings, lowered.dag)

    if step.facts is training.facts:
        return replace(step, planned=lambda: forwards().plans), lowered.dag.buckets
    made = forwards()
    return replace(step, planned=lambda: made.plans), made.dag.buckets


def stages_of(strategy: Strategy) -> tuple[str, ...]:
    """The tags that the ``partition`` directives of ``strategy`` make."""
    return tuple(d.into for d in strategy.directives if isinstance(d, Partition))


def step_of(
    lowered: Lowered,
    models: Mapping[int, Model],
    strategy: Strategy,
    example: Batch,
    settings: Settings,
) -> LoweredStep:
    """What simulation and views read of a lowered training step."""
    first = next(x for x in example.leaves if isinstance(x, torch.Tensor))
    return LoweredStep(
        dag=lowered.dag,
        models=models,
        plans=lowered.plans,
        memory=lowered.memory,
        streams=lowered.dag.streams,
        stages=stages_of(strategy),
        tokens=first.numel(),
        fused=settings.fused,
        optimizer=settings.optimizer,
    )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model and a strategy, ready to be lowered; a file holds these."""

    strategy: Strategy
    training: Training
    source: Source | None
    """Where the weights come from. A loaded program has none until it is given one."""
    settings: Settings
    training_step: Step = field(repr=False)
    evaluation_step: Step = field(repr=False)
    example: Batch = field(repr=False)
    names: StateNames = field(repr=False)
    device: torch.device
    compiler: Compiler
    computation: Computation | None = field(repr=False)
    """The traced computation of the model and the loss; None if an earlier version of Piper, which
    did not keep it, saved the program."""
    frozen: frozenset[str] | None = field(default=None, repr=False, compare=False)
    """The parameters that did not require grad; None for a loaded program."""
    given: str | None = field(default=None, repr=False, compare=False)
    """A digest of what was compiled, to compare with other processes; None if there are none."""

    @property
    def steps(self) -> tuple[Step, Step]:
        """The steps of training and of evaluation."""
        return self.training_step, self.evaluation_step

    @property
    def codes(self) -> tuple[Executables, Executables]:
        """The code of training and of evaluation."""
        return self.training_step.code, self.evaluation_step.code

    @property
    def models(self) -> Mapping[int, Model]:
        """The model's facts at the shapes of each group size."""
        return self.training_step.facts.models

    @cached_property
    def parameters(self) -> Mapping[str, TensorSpec]:
        """The full specs of all parameters that training or evaluation uses."""
        training, evaluation = self.codes
        return {**evaluation.parameters, **training.parameters}


@dataclass(frozen=True, kw_only=True)
class Compiled(Parts):
    """A model compiled under a strategy."""

    lowered: Lowered = field(repr=False)
    """The lowered training step."""
    buckets: tuple[Bucket, ...] = field(repr=False)
    """Parameters that are reduced, updated and gathered together."""
    arguments: CompileArguments | None = field(default=None, repr=False, compare=False)
    """What was compiled; None for a loaded program, which has no model."""
    again: Callable[..., Compiled] | None = field(default=None, repr=False, compare=False)
    """Compiles a change of ``arguments`` (batches of other shapes, another copy of the model) under
    the same strategy; None for a loaded program."""

    @cached_property
    def located(self) -> Mapping[str, FirstTensor] | None:
        """The initial weights in files, by name; None if they do not come from files."""
        source = self.source
        if source is None or not isinstance(source.init, WeightFiles):
            return None
        return located(source, self.names, source.init)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of a training step, one for each rank equivalence class."""
        return self.training_step.plans

    def with_plans(self, plans: tuple[Plan, ...]) -> Self:
        """This program with other plans of its training step."""
        step = replace(self.training_step, planned=lambda: plans)
        return replace(self, training_step=step, given=None)

    @property
    def dag(self) -> Dag:
        """The lowered DAG of the whole step over all devices."""
        return self.lowered.dag

    @property
    def memory(self) -> tuple[Memory, ...]:
        """The memory of each rank class, in the order of ``plans``."""
        return self.lowered.memory

    @property
    def streams(self) -> Mapping[str, StreamRule]:
        """The streams with settings of their own, by name."""
        return self.dag.streams

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.dag.microbatches[1] if self.dag.microbatches else 1

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that the program runs on."""
        return tuple(sorted(d for plan in self.plans for d in plan.devices))

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the reported loss: its own, but at least fp32."""
        code, _ = self.codes
        own = next(iter(code.values.values()))[code.loss].dtype
        return torch.promote_types(own, torch.float32)

    @cached_property
    def loss_groups(self) -> tuple[int, ...]:
        """For each microbatch, the number of devices that shard the rows of its loss."""
        forwards = {
            x.op: x.rows.parts
            for plan in self.plans
            for x in plan.instructions
            if isinstance(x.op, Compute) and x.op.which is Pass.F
        }
        code = self.training_step.code
        computed = {op.chunk for op in forwards}
        makers = {v: i for i, piece in enumerate(code.pieces) for v in piece.outputs}
        chunk = makers[code.loss]
        while chunk not in computed:  # a redistribution of another chunk's result
            chunk = makers[code.pieces[chunk].inputs[0]]
        return tuple(group for op, group in forwards.items() if op.chunk == chunk)

    @property
    def loss_parts(self) -> int:
        """The number of losses, over microbatches and devices, that the reported loss averages. A
        loss of a group smaller than the largest counts as several."""
        return len(self.loss_groups) * max(self.loss_groups)

    @cached_property
    def trained(self) -> Mapping[str, tuple[int, ...]]:
        """The full shapes of the trained parameters."""
        return trained_shapes(self.training_step.facts.whole, self.training_step.code)

    @cached_property
    def held_names(self) -> frozenset[str]:
        """The parameters and buffers that at least one device holds."""
        pieces = [piece for code in self.codes for piece in code.pieces]
        return frozenset(
            n for p in pieces for n in (*p.parameters, *p.buffers) if not n.startswith(RANK)
        )

    def refuse_refrozen(self) -> None:
        """Refuse a model whose frozen parameters changed since compilation."""
        if self.source is None:
            return
        now = self.source.frozen
        # for a loaded program only the trained parameters are known
        self.source.refuse_refrozen(
            now - self.trained.keys() if self.frozen is None else self.frozen
        )

    def plan_of(self, device: int) -> Plan:
        """The plan of one device in a training step."""
        return self.training_step.plan_of(device)

    @property
    def stages(self) -> tuple[str, ...]:
        """The tags that ``partition`` directives made."""
        return stages_of(self.strategy)

    @cached_property
    def lowered_step(self) -> LoweredStep:
        """What simulation and views read of a training step."""
        lowered = replace(self.lowered, plans=self.plans)
        return step_of(lowered, self.models, self.strategy, self.example, self.settings)
