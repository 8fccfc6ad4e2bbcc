"""``compile``: a model and a strategy enter; a ``Program``, ready to launch, leaves.

The model is captured once for each group size of the strategy, at the shapes that one device of
such a group sees. The strategy rewrites the DAG. Lowering makes the plans. ``capture`` keeps the
captured model, to compile it under several strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from piper.base.arguments import CompilerName, named_arguments
from piper.base.errors import DirectiveError, PiperError, warn
from piper.base.modes import default_dtype, without_collection, without_modes
from piper.base.units import counted, nbytes_of
from piper.capture.captured_facts import facts_of
from piper.capture.code.codegen import Eager
from piper.capture.loss.outputs import Outputs
from piper.capture.loss.own_loss import Loss
from piper.capture.model import Captured, device_of
from piper.capture.regions import ChosenTags
from piper.cost.cluster import Cluster
from piper.cost.rough_costs import Costs, recorded_of
from piper.cost.simulate.estimate import Estimate
from piper.cost.simulate.simulation import simulate
from piper.cost.tasks import CostModel
from piper.ir.dag.build import build
from piper.ir.dag.dag import Dag
from piper.ir.dag.facts import Model
from piper.ir.passes import RematPolicy
from piper.ir.plan.lowered import Lowered
from piper.ir.rules import OptimizerCost
from piper.ir.tensors import TensorSpec
from piper.lower.lower import Settings, lower
from piper.lower.waste import LARGE
from piper.program.cache.entries import Entries
from piper.program.cache.lookup import Lookup
from piper.program.chunk_table import letters_of
from piper.program.compile.compile_arguments import ELSEWHERE, CompileArguments
from piper.program.compile.digest import digest_of
from piper.program.compile.model_warnings import (
    warn_of_checkpointing,
    warn_of_derived_plans,
    warn_of_half_precision,
    warn_of_mixing,
    warn_of_untrained,
)
from piper.program.compile.placer import Placed, Placer
from piper.program.compile.rank_zero import JobStore
from piper.program.compile.stages import Stages
from piper.program.compile.traces import Traces
from piper.program.compiled import Step, evaluated, step_of, trained_shapes
from piper.program.deferred import Deferred
from piper.program.program import Program
from piper.state.optimizer.factory import OptimizerFactory
from piper.state.optimizer.optimizer_checks import check_factory
from piper.state.optimizer.probe import cost_of
from piper.state.optimizer.scheduler import SchedulerFactory
from piper.state.optimizer.training import Training
from piper.state.weights.source import Source, StateNames
from piper.state.weights.weight_files import Init, WeightFiles
from piper.strategies.directives.place import Place
from piper.strategies.directives.shard import Shard
from piper.strategies.directives.split import Split
from piper.strategies.replicas.uneven import by_profile
from piper.strategies.strategy import Strategy


@named_arguments(PiperError, ELSEWHERE)
def capture(
    model: nn.Module,
    *,
    inputs: Sequence[Any] | Mapping[str, Any],
    targets: Sequence[Any] = (),
    loss: Loss | None = None,
    outputs: Outputs | None = None,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    tags: Mapping[str, str] | None = None,
    init: Init | WeightFiles | None = None,
    compiler: str = CompilerName.EAGER.value,
    device: torch.device | str | None = None,
    precision: str = "fp32",
    remat: str | None = None,
    clip_norm: float | None = None,
    on_nan: str | None = None,
    seed: int = 0,
) -> Capture:
    """Capture ``model`` for training under strategies given later.

    ``inputs`` and ``targets`` are one example of the global batch: real, fake or meta tensors.
    ``loss`` may be omitted if the model returns its own loss, like models of transformers that get
    labels. ``outputs`` selects values to report besides the loss: a function of the same arguments
    that returns a dict of tensors. Every step reports the mean of scalars; ``evaluate`` returns
    tensors with the rows of the batch.
    ``optimizer`` makes a ``torch.optim`` optimizer from a list of parameters; without one nothing
    is updated. ``scheduler`` makes its learning-rate scheduler, which advances once per step.
    ``init`` fills the parameters of a model on the meta device, or is ``piper.weights(folder)``,
    which replaces the parameters of any model. ``precision="bf16"`` computes in bf16 and keeps fp32
    weights for the optimizer. ``clip_norm`` bounds the global gradient norm.
    ``on_nan`` handles a step whose gradients are not finite: ``"skip"`` and ``"stop"`` update
    nothing, then continue or raise. ``seed`` seeds ``init`` and random operations.
    """
    return checked_capture(CompileArguments.among(locals()))


@named_arguments(PiperError, ELSEWHERE)
def compile(
    model: nn.Module,
    strategy: Strategy,
    *,
    inputs: Sequence[Any] | Mapping[str, Any],
    targets: Sequence[Any] = (),
    loss: Loss | None = None,
    outputs: Outputs | None = None,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    tags: Mapping[str, str] | None = None,
    init: Init | WeightFiles | None = None,
    compiler: str = CompilerName.EAGER.value,
    device: torch.device | str | None = None,
    precision: str = "fp32",
    remat: str | None = None,
    clip_norm: float | None = None,
    on_nan: str | None = None,
    memory_limit: int | str | None = None,
    costs: CostModel | None = None,
    seed: int = 0,
    progress: bool | None = None,
    cache: bool = True,
) -> Program:
    """Compile ``model`` for training under ``strategy``: ``capture``, then ``Capture.compile``,
    with the arguments of both."""
    _check_strategy(strategy)
    captured = checked_capture(CompileArguments.among(locals()))
    return captured.compile(
        strategy, memory_limit=memory_limit, costs=costs, progress=progress, cache=cache
    )


def checked_capture(given: CompileArguments) -> Capture:
    """The captured model of ``given``; refuses what is wrong for every strategy."""
    given.check()
    return Capture(given, torch.get_default_dtype())


@dataclass(frozen=True, slots=True)
class _Under:
    """What a captured model is compiled under."""

    strategy: Strategy
    memory_limit: int | None
    """In bytes."""
    costs: CostModel | None
    progress: bool | None = None
    cache: bool = False


class Capture:
    """A captured model, to compile under any number of strategies. It is traced when a strategy
    first needs it, once for each number of rows on a device. Traces are cached, so nothing but the
    weights of the model may change."""

    def __init__(self, given: CompileArguments, default_dtype: torch.dtype) -> None:
        self._given = given
        self._size = given.batch.size
        self._training = given.training(default_dtype)
        self._source = Source(given.model, given.loss_module, given.init)
        self._frozen = self._source.frozen
        self._traces = Traces(given)
        self._placer = Placer(self._traces.passes)
        self._cost: OptimizerCost | None = None

    def __str__(self) -> str:
        """Its chunks, one per line, and the tags if Piper chose them. Chunks with equal programs
        have equal letters."""
        whole = self._whole()
        letters = letters_of(whole)
        pairs = zip(whole.chunks, whole.programs, strict=True)
        rows = [f"{chunk.name:15} program {letters[program]}" for chunk, program in pairs]
        tags = self._traces.tags
        if isinstance(tags, ChosenTags):
            rows.append(f"regions chosen by Piper: tags={tags}; give others, or tags={{}} for none")
        return "\n".join(rows)

    @property
    def dag(self) -> Dag:
        """The step before any directive: the whole batch at once, not placed on any device."""
        return build(self._placer.facts_of(self._whole()))

    @cached_property
    def model(self) -> Model:
        """The facts of the whole batch on one device."""
        whole = self._whole()
        policies = dict.fromkeys((RematPolicy.NONE, RematPolicy.ALL, whole.remat))
        return facts_of(whole, whole.remat, known=self._placer.known, policies=policies)

    @cached_property
    def optimizer_cost(self) -> OptimizerCost:
        """The memory of the optimizer."""
        known = self.model.parameters
        return self._cost_of({n: facts.shape for n, facts in known.items() if facts.trained})

    @property
    def fused(self) -> bool:
        """Whether the compiler fuses operations."""
        return not isinstance(self._whole().compiler, Eager)

    def _cost_of(self, trained: Mapping[str, tuple[int, ...]]) -> OptimizerCost:
        if self._cost is None:
            where = device_of(self._given.model, self._given.device)
            with without_modes():
                self._cost = cost_of(self._training.optimizer, trained, where)
        return self._cost

    def _whole(self) -> Captured:
        with default_dtype(self._training.default_dtype):
            return self._traces.training(1)

    def compile(
        self,
        strategy: Strategy,
        *,
        memory_limit: int | str | None = None,
        costs: CostModel | None = None,
        progress: bool | None = None,
        cache: bool = False,
    ) -> Program:
        """The program of ``strategy``. ``memory_limit`` is the memory of a device, in bytes or as a
        size such as "80GB"; a strategy that needs more is refused. ``costs`` orders what the
        strategy leaves open: ``piper.Costs``, a ``piper.Cluster``, measurements, or your own cost
        model. After a second a terminal shows what is done; without a terminal there is a
        line after five seconds and one at the end. ``progress`` says whether to show all stages.
        ``program.timings`` has the seconds of each stage. With ``cache``, which is the default of
        ``piper.compile``, a program that was compiled before is loaded from the user's cache."""
        _check_strategy(strategy)
        _check_costs(costs)
        if (recorded := recorded_of(costs)) is not None:
            strategy = by_profile(strategy, recorded)
        limit = None if memory_limit is None else nbytes_of("memory_limit", memory_limit)
        self._source.refuse_refrozen(self._frozen)
        under = _Under(strategy, limit, costs, progress, cache)
        job = JobStore.of_this_process()
        if job is None:
            return self._found_or_compiled(under)
        digest = digest_of(*self._compiled_from(under)).text
        here = partial(self._found_or_compiled, under, digest)
        deferred = partial(Deferred.made, here, **self._known(under, digest))
        return job.compiled(digest, here, deferred)

    def _known(self, under: _Under, digest: str | None) -> dict[str, Any]:
        """The fields of a program that are known before it is compiled."""
        return {
            "strategy": under.strategy,
            "training": self._training,
            "source": self._source,
            "names": StateNames.of(self._source),
            "example": self._given.batch,
            "device": device_of(self._given.model, self._given.device),
            "arguments": self._given,
            "again": partial(self._again, under),
            "frozen": self._frozen,
            "given": digest,
        }

    def _compiled_from(self, under: _Under) -> tuple[object, ...]:
        """Everything that is compiled. The optimizer, which changes only plans, is compared
        otherwise."""
        it, batch = self._given, self._given.batch
        example = [TensorSpec.of(x) if isinstance(x, Tensor) else x for x in batch.leaves]
        return (
            it.model, it.loss, str(batch.spec), example, device_of(it.model, it.device).type,
            it.tags, it.compiler, it.remat, it.precision, it.outputs, it.clip_norm, it.seed,
            it.on_nan, self._training.default_dtype, str(under.strategy.to_json()),
            under.memory_limit, under.costs,
        )  # fmt: skip

    def _found_or_compiled(self, under: _Under, digest: str | None = None) -> Program:
        """The program from the cache, or compiled here."""
        stages = Stages("compiling", under.progress)
        compiled = partial(self._compiled, under, stages, digest)
        entries = Entries.of_user() if under.cache else None
        if entries is None:
            return compiled()
        with stages.stage("looking into the cache"):
            lookup = Lookup.of(entries, self._compiled_from(under))
            found = lookup.found()
        if found is None:
            return lookup.keeping(type(self._given.model).__name__, compiled)
        about, files = found
        line = f"from the cache, compiled on {about.compiled}"
        with stages.stage(line), without_collection():
            program = Program.of_files(
                files,
                lookup.entries.folder,
                self._source,
                self._training.optimizer,
                self._training.scheduler,
            )
        _ = program.located  # refuse weight files that do not match, now
        for text in about.warnings:
            warn(text)
        stages.end()
        return replace(
            program,
            **self._known(replace(under, strategy=program.strategy), digest),
            settings=replace(program.settings, costs=under.costs or Costs()),
            tracing=f"{line}\n{about.tracing}".rstrip(),
            timings=stages.seconds,
        )

    def estimate(
        self, strategy: Strategy, cluster: Cluster, *, costs: CostModel | None = None
    ) -> Estimate:
        """The time and memory of a step of ``strategy`` on ``cluster``, without code, evaluation or
        proofs: they equal those of ``self.compile(strategy, costs=cluster)`` and of its
        ``simulate(cluster, costs)``, at a fraction of the time. ``compile`` may still refuse the
        strategy, for the optimizer or for what only evaluation mode does."""
        _check_strategy(strategy)
        if not isinstance(cluster, Cluster):
            raise PiperError(f"cluster={cluster!r} must be a piper.Cluster")
        self._source.refuse_refrozen(self._frozen)
        under = _Under(strategy, None, cluster)
        with default_dtype(self._training.default_dtype), without_collection():
            shape = _shape(strategy, self._size)
            strategy = self._with_plans(strategy, shape)
            placed = self._placed(strategy, shape)
            settings = self._settings(under, placed, shape)
            lowered = lower(placed.dag, placed.facts.models, settings, proven=False)
            example = self._given.batch
            step = step_of(lowered, placed.facts.models, strategy, example, settings)
            return Estimate.of(simulate(step, cluster, costs))

    def _captured(self, shape: _Shape) -> dict[int, Captured]:
        """The model as one device of each group size sees it."""
        return {n: self._traces.training(n * shape.microbatches) for n in shape.groups}

    def _with_plans(self, strategy: Strategy, shape: _Shape) -> Strategy:
        """``strategy`` with ``parameters=`` for a model that declares no tensor parallelism."""
        first = next(iter(self._captured(shape).values()))
        return self._placer.with_plans(strategy, first)

    def _placed(self, strategy: Strategy, shape: _Shape) -> Placed:
        """The model under ``strategy``."""
        for directive in strategy.directives:
            if isinstance(directive, Shard):
                directive.check_names(StateNames.of(self._source).keys)
        return self._placer.placed(strategy, self._captured(shape), shape.experts)

    def _settings(self, under: _Under, placed: Placed, shape: _Shape) -> Settings:
        """The inputs of lowering."""
        first = next(iter(self._captured(shape).values()))
        known = placed.facts.whole.parameters
        trained = {name: facts.shape for name, facts in known.items() if facts.trained}
        return Settings(
            clip=self._training.waits_for_norm,
            optimizer=self._cost_of(trained),
            memory_limit=under.memory_limit,
            gpu=first.device.type == "cuda",
            fused=not isinstance(first.compiler, Eager),
            costs=Costs() if under.costs is None else under.costs,
        )

    def _compiled(self, under: _Under, stages: Stages, digest: str | None) -> Program:
        strategy = under.strategy
        shape = _shape(strategy, self._size)
        with default_dtype(self._training.default_dtype), without_collection():
            with stages.stage("capturing the model"):
                captured = self._captured(shape)
            first = next(iter(captured.values()))
            if self._given.remat is None:
                warn_of_checkpointing(self._given.model, strategy, first.checkpoints)
            warn_of_mixing(captured.values())
            with stages.stage("applying the strategy"):
                strategy = self._with_plans(strategy, shape)
                placed = self._placed(strategy, shape)
            if strategy is not under.strategy:
                warn_of_derived_plans(strategy, under.strategy)
                under = replace(under, strategy=strategy)
            trained = trained_shapes(placed.facts.whole, placed.code)
            warn_of_untrained(self._given.trained.keys() - trained.keys())
            if self._training.optimizer is not None and self._training.master is None:
                warn_of_half_precision({n: placed.code.parameters[n].dtype for n in trained})
            settings = self._settings(under, placed, shape)
            with stages.stage("planning"):
                lowered = _lowered(placed, self._training, settings, trained, first.device)
            with stages.stage("capturing evaluation mode"):
                evaluation = self._evaluation(strategy, shape, captured, placed)
            with stages.stage("planning"):
                training_step = Step(placed.facts, placed.code, lambda: lowered.plans)
                evaluation_step, buckets = evaluated(
                    Step(evaluation.facts, evaluation.code),
                    training_step,
                    lowered,
                    strategy,
                    settings,
                )
        program = Program(
            **self._known(under, digest),
            settings=settings,
            training_step=training_step,
            evaluation_step=evaluation_step,
            lowered=lowered,
            buckets=buckets,  # of training, then those that only evaluation uses
            compiler=first.compiler,
            computation=first.computation,
            tracing=first.tracing,
            timings=stages.seconds,
        )
        _ = program.located  # refuse weight files that do not match, now
        for waste in program.waste:
            if waste.share > LARGE:
                warn(f"{waste}. {_CURES[waste.copies is None]}")
        stages.end()
        return program

    def _evaluation(
        self, strategy: Strategy, shape: _Shape, captured: Mapping[int, Captured], placed: Placed
    ) -> Placed:
        """The model as placed for evaluation: ``placed``, where the mode changes nothing."""
        first = next(iter(captured.values()))
        if not self._traces.depends_on_mode(first.microbatches):
            return placed
        again = {n: self._traces.evaluation(c.microbatches) for n, c in captured.items()}
        return self._placer.placed_for_evaluation(strategy, again, shape.experts, placed)

    def _again(self, under: _Under, given: CompileArguments, *, limited: bool = True) -> Program:
        """The program of ``given``, a change of the arguments here, under the same strategy.
        Without ``limited`` it may need more memory."""
        self._source.refuse_refrozen(self._frozen)
        limit = under.memory_limit if limited else None
        other = Capture(given, self._training.default_dtype)
        return other.compile(
            under.strategy, memory_limit=limit, costs=under.costs, cache=under.cache
        )


_CURES = {
    False: "Shard its weights (parameters= of shard or mesh), or give the axis to the batch",
    True: "Write it with operations that have a rule, or leave what feeds it whole",
}
"""Advice against duplicate computation (False), and against gathered inputs (True)."""


def _check_strategy(strategy: object) -> None:
    if not isinstance(strategy, Strategy):
        raise DirectiveError(
            f"strategy={strategy!r} must be a piper.Strategy, such as piper.strategies.mesh(dp=2) "
            "or piper.Strategy([...]) of a list of directives"
        )


def _check_costs(costs: object) -> None:
    if not isinstance(costs, CostModel | None):
        raise PiperError(
            f"costs={costs!r} must be piper.Costs(...) or another cost model, which has a method "
            "duration(task, devices), or None"
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a strategy splits and shards the batch."""

    microbatches: int
    groups: tuple[int, ...]
    """The sizes of the groups that it places regions on."""
    experts: tuple[int, ...] = ()
    """Further sizes, of groups that run only experts: they get their rows from other regions."""


def _shape(strategy: Strategy, batch: int) -> _Shape:
    parts = [d.parts for d in strategy.directives if isinstance(d, Split)]
    places = [d for d in strategy.directives if isinstance(d, Place) and d.devices]
    groups = [place for place in places if not _of_experts(place, strategy)] or places
    count = parts[0] if parts and isinstance(parts[0], int) and parts[0] > 0 else 1
    for place in groups:
        each = count * place.parts
        if batch % each and place.parts > 1:
            fits = [n for n in range(1, batch + 1) if batch % (n * place.parts) == 0]
            advice = f"give microbatches= (split: parts=) one of {fits}" if fits else (
                f"give a batch that is a multiple of {each}"
            )  # fmt: skip
            raise DirectiveError(
                f"{place}: a batch of {batch} in {counted(count, 'microbatch')} "
                f"does not divide over {place.parts} devices; {advice}"
            )
    if batch % count:
        count = 1  # the split directive reports this error
    sizes = tuple(dict.fromkeys(p.parts for p in groups)) or (1,)
    axes = {d.batch for d in strategy.directives if isinstance(d, Shard) and d.batch is not None}
    experts = [place.parts for place in places]
    experts += [replace(p, batch=names).parts for p in places for names in axes if p.axes]
    return _Shape(count, sizes, tuple(dict.fromkeys(n for n in experts if n not in sizes)))


def _of_experts(place: Place, strategy: Strategy) -> bool:
    """Whether it places only regions of experts: regions that a ``shard`` filter names."""
    return any(
        isinstance(d, Shard)
        and d.axis is None
        and d.where
        and all(
            key in place.where and value in (place.where[key], "*") and place.where[key] != "-"
            for key, value in d.where.items()
        )
        for d in strategy.directives
    )


def _lowered(
    placed: Placed,
    training: Training,
    settings: Settings,
    trained: Mapping[str, tuple[int, ...]],
    device: torch.device,
) -> Lowered:
    """The lowered training step."""
    lowered = lower(placed.dag, placed.facts.models, settings)
    if training.optimizer is not None:
        with without_modes():
            check_factory(training.optimizer, settings.optimizer, lowered.dag, trained, device)
    return lowered
