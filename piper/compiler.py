"""``compile``: a model and a strategy go in; a ``Program``, ready to be launched, comes out.

The model is captured once for each size of group that the strategy places regions on, at the shape
that one device of such a group sees; the strategy rewrites the DAG; lowering makes the plans.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from piper.capture.batch import Batch
from piper.capture.codegen import CompilerName
from piper.capture.experts import trace_share
from piper.capture.export import Loss
from piper.capture.joint import Joint
from piper.capture.model import Captured, capture, trace
from piper.capture.owners import consume_inputs
from piper.capture.passes import split
from piper.capture.program import Pass
from piper.capture.program import Program as ChunkProgram
from piper.capture.saving import Remat
from piper.directives.partition import Partition
from piper.directives.place import Place
from piper.directives.remat import Remat as RematDirective
from piper.directives.split import Split
from piper.errors import CaptureError, DirectiveError, PiperError, PiperWarning
from piper.ir.build import build
from piper.ir.dag import Dag
from piper.ir.facts import Model, Variants, facts_of
from piper.lower.costs import Costs
from piper.lower.lower import Lowered, Settings, lower
from piper.optimizer import (
    OptimizerFactory,
    SchedulerFactory,
    check_divisible,
    check_taken,
    cost_of,
    try_scheduler,
)
from piper.program import Code, Program, Training, trained_shapes
from piper.strategy import Strategy
from piper.weights import Init, Source, StateNames


def compile(
    model: nn.Module,
    strategy: Strategy,
    *,
    inputs: Sequence[Any] | Mapping[str, Any],
    targets: Sequence[Any] = (),
    loss: Loss,
    optimizer: OptimizerFactory | None = None,
    scheduler: SchedulerFactory | None = None,
    tags: Mapping[str, str] | None = None,
    init: Init | None = None,
    compiler: str = CompilerName.EAGER.value,
    device: torch.device | str | None = None,
    precision: str = "fp32",
    remat: str | None = None,
    clip_norm: float | None = None,
    memory_limit: int | None = None,
    costs: Costs | None = None,
    seed: int = 0,
) -> Program:
    """Compile ``model`` for training under ``strategy``.

    ``inputs`` and ``targets`` are one example of the global batch: real, fake or meta tensors.
    ``optimizer`` makes a ``torch.optim`` optimizer from a list of parameters; without one nothing
    is updated; ``scheduler`` makes its learning-rate scheduler, which advances once a step.
    ``init`` fills the parameters of a model on the meta device. ``precision="bf16"`` computes in
    bf16 and keeps fp32 weights for the optimizer. ``clip_norm`` bounds the norm of all gradients.
    ``memory_limit`` is the bytes that a device has: a strategy that needs more is refused.
    ``costs`` says how fast devices compute and communicate, or what was measured: what a strategy
    leaves open is ordered by it. ``seed`` is for ``init`` and for random operations.
    """
    if not isinstance(strategy, Strategy):
        raise DirectiveError(f"strategy={strategy!r} must be a piper.Strategy")
    training = Training(optimizer, scheduler, clip_norm, precision, seed)
    training.check()
    _check(init, memory_limit, costs)
    try_scheduler(optimizer, scheduler)
    _warn_of_evaluation_mode(model)
    shape = _shape(strategy, Batch.of(inputs, targets).size)
    how = _Capture(
        model, inputs, targets, loss, tags, shape.microbatches, device, compiler, remat, precision
    )
    with _no_collection():
        captured = {n: how.at(n) for n in shape.groups}
        _warn_of_checkpointing(how, strategy, _first(captured).checkpoints)
        settings = Settings(
            clip=training.clip_norm is not None,
            optimizer=cost_of(training.optimizer, _first(captured).device),
            memory_limit=memory_limit,
            costs=costs or Costs(),
        )
        found = _compile(strategy, captured, training, settings)
        first = _first(captured)
        if _depends_on_mode(how, first):
            with _evaluating(model, loss):
                again = {n: how.at(n) for n in shape.groups}
            evaluation = _evaluation(strategy, again, found)
        else:
            evaluation = _evaluation_of(found)
    source = Source(model, loss if isinstance(loss, nn.Module) else None, init)
    program = Program(
        strategy=strategy,
        training=training,
        source=source,
        names=StateNames.of(source),
        settings=found.settings,
        models=found.models,
        plans=found.lowered.plans,
        evaluation_plans=evaluation.lowered.plans,
        memory=found.lowered.memory,
        buckets=evaluation.lowered.dag.buckets,  # training's, and what only evaluation uses
        streams=found.lowered.dag.streams,
        microbatches=shape.microbatches,
        code=found.code,
        evaluation_code=evaluation.code,
        example=first.example,
        device=first.device,
        compiler=first.compiler,
    )
    vars(program)["lowered"] = found.lowered  # a cached property: it need not be made again
    return program


def _check(init: object, memory_limit: int | None, costs: object) -> None:
    if init is not None and not callable(init):
        raise PiperError(f"init={init!r} must be a function (name, tensor, generator)")
    whole = isinstance(memory_limit, int) and not isinstance(memory_limit, bool)
    if memory_limit is not None and (not whole or memory_limit <= 0):
        raise PiperError(f"memory_limit={memory_limit!r} must be a number of bytes, or None")
    if not isinstance(costs, Costs | None):
        raise PiperError(f"costs={costs!r} must be piper.Costs(...), or None")


def _warn_of_evaluation_mode(model: nn.Module) -> None:
    """A model straight from a library is often in evaluation mode: nothing else would say so."""
    if isinstance(model, nn.Module) and not model.training:
        warnings.warn(
            f"{type(model).__name__} is in evaluation mode and is trained like that, without "
            "dropout and with fixed batch-norm statistics: call model.train() before, or silence "
            "this warning if it is meant",
            PiperWarning,
            stacklevel=3,
        )


def _warn_of_checkpointing(how: _Capture, strategy: Strategy, lines: Sequence[str]) -> None:
    """The strategy says what is computed again: what the model says of it saves no memory."""
    decided = how.remat is not None or any(
        isinstance(d, RematDirective) for d in strategy.directives
    )
    if lines and not decided:
        warnings.warn(
            f"{type(how.model).__name__} asks for activation checkpointing "
            f"(torch.utils.checkpoint, at {lines[0]}), which changes no number here and saves no "
            "memory: what is computed again is said by the strategy; add "
            "piper.remat({...}, 'all') for the regions meant, or give remat= to compile",
            PiperWarning,
            stacklevel=3,
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a strategy divides the batch."""

    microbatches: int
    groups: tuple[int, ...]
    """The sizes of groups that it places regions on."""


def _shape(strategy: Strategy, batch: int) -> _Shape:
    parts = [d.parts for d in strategy.directives if isinstance(d, Split)]
    groups = [d for d in strategy.directives if isinstance(d, Place) and d.devices]
    count = parts[0] if parts and isinstance(parts[0], int) and parts[0] > 0 else 1
    for place in groups:
        each = count * len(place.devices)
        if batch % each:
            fits = [n for n in range(1, batch + 1) if batch % (n * len(place.devices)) == 0]
            advice = f"numbers of microbatches that work for it: {fits}" if fits else (
                f"give a batch that is a multiple of {each}"
            )  # fmt: skip
            raise DirectiveError(
                f"{place}: a batch of {batch} in {count} microbatches does not divide over "
                f"{len(place.devices)} devices; {advice}"
            )
    if batch % count:
        count = 1  # split itself says what is wrong
    return _Shape(count, tuple(dict.fromkeys(len(p.devices) for p in groups)) or (1,))


@dataclass(frozen=True, slots=True)
class _Capture:
    """Everything that a capture needs but the size of the group."""

    model: nn.Module
    inputs: Sequence[Any] | Mapping[str, Any]
    targets: Sequence[Any]
    loss: Loss
    tags: Mapping[str, str] | None
    microbatches: int
    device: torch.device | str | None
    compiler: str
    remat: str | None
    precision: str

    def traced(self, group: int) -> str:
        """What ``at`` would trace."""
        return trace(
            self.model,
            inputs=self.inputs,
            targets=self.targets,
            loss=self.loss,
            tags=self.tags,
            microbatches=self.microbatches * group,
            device=self.device,
            precision=self.precision,
        )

    def at(self, group: int) -> Captured:
        """The model as one of ``group`` devices sees it for one microbatch."""
        return capture(
            self.model,
            inputs=self.inputs,
            targets=self.targets,
            loss=self.loss,
            tags=self.tags,
            microbatches=self.microbatches * group,
            device=self.device,
            compiler=self.compiler,
            remat=self.remat,
            precision=self.precision,
        )


def _first(captured: Mapping[int, Captured]) -> Captured:
    return next(iter(captured.values()))


@dataclass(frozen=True, slots=True)
class _Compiled:
    lowered: Lowered
    code: Code
    placed: Dag
    models: Mapping[int, Model]
    settings: Settings


def _compile(
    strategy: Strategy,
    captured: Mapping[int, Captured],
    training: Training,
    settings: Settings,
) -> _Compiled:
    """Apply and lower the strategy."""
    placed, models, code = _placed(strategy, captured)
    lowered = lower(placed, models, settings)
    if training.optimizer is not None:
        dag = lowered.dag
        check_taken(training.optimizer, trained_shapes(dag.buckets, code))
        check_divisible(
            training.optimizer,
            dag.buckets,
            dag.history,
            _first(captured).device,
        )
    return _Compiled(lowered, code, placed, models, settings)


def _placed(
    strategy: Strategy, captured: Mapping[int, Captured]
) -> tuple[Dag, Mapping[int, Model], Code]:
    known: Variants = {}
    facts = {n: facts_of(c, c.remat, known=known) for n, c in captured.items()}
    _refuse_different(facts, {n: c.example.size // c.microbatches for n, c in captured.items()})
    placed = strategy.apply(build(facts[next(iter(captured))]))
    joints = {n: _joints(c, placed) for n, c in captured.items()}
    models = {n: facts_of(c, c.remat, joints[n], known) for n, c in captured.items()}
    for n in captured:
        _refuse_other_share(facts[n], models[n])
    programs = {n: _programs(c, joints[n], placed) for n, c in captured.items()}
    return placed, models, Code.of(captured, programs)


def _evaluation(
    strategy: Strategy, captured: Mapping[int, Captured], found: _Compiled
) -> _Compiled:
    """The forwards alone of a model that computes otherwise in evaluation mode, in the stages that
    training has."""
    try:
        placed, models, code = _placed(_partitioned(strategy, found.placed), captured)
    except DirectiveError as error:
        raise DirectiveError(
            f"{error}. In evaluation mode (model.eval()) the model has other regions than in "
            "training mode: a strategy must fit both"
        ) from None
    return _forwards(found, placed, models, code)


def _partitioned(strategy: Strategy, placed: Dag) -> Strategy:
    """``strategy`` with every partition as it came out in ``placed``: the parameters are there."""

    def counted(partition: Partition) -> Partition:
        tag, into = partition.tag, partition.into
        stages = {n.tags[tag]: n.tags[into] for n in placed.nodes if tag in n.tags}
        counts = Counter(stages.values())
        return replace(partition, by=[counts[stage] for stage in range(partition.parts)])

    return Strategy(counted(d) if isinstance(d, Partition) else d for d in strategy.directives)


def _evaluation_of(found: _Compiled) -> _Compiled:
    """The forwards of a compiled step alone, where evaluation computes the same as training."""
    return _forwards(found, found.placed, found.models, found.code)


def _forwards(found: _Compiled, placed: Dag, models: Mapping[int, Model], code: Code) -> _Compiled:
    settings = replace(found.settings, memory_limit=None)
    lowered = lower(_forward_only(placed), models, settings, found.lowered.dag)
    return _Compiled(lowered, code, placed, models, settings)


def _forward_only(dag: Dag) -> Dag:
    """``dag`` without its backwards."""
    kept = [i for i, node in enumerate(dag.nodes) if node.compute.which is Pass.F]
    moved = {old: new for new, old in enumerate(kept)}
    nodes = []
    for i in kept:
        node = dag.nodes[i]
        pairs = zip(node.after, node.after_by, strict=True)
        after = [(moved[b], by) for b, by in pairs if b in moved]
        nodes.append(
            replace(node, after=tuple(b for b, _ in after), after_by=tuple(by for _, by in after))
        )
    return replace(dag, nodes=tuple(nodes))


def _joints(captured: Captured, dag: Dag) -> tuple[Joint, ...]:
    """The joint graph of each chunk; of a sharded one, that of a device's share."""
    shares: dict[tuple[int, int, int], Joint] = {}
    found = []
    for chunk, joint in zip(captured.chunks, captured.joints, strict=True):
        rule = dag.shards.get(chunk.index)
        if rule is not None and rule.ways > 1:
            key = (id(joint), rule.ways, rule.dim)
            if key not in shares:
                shares[key] = trace_share(chunk, joint, rule.ways, rule.dim, captured.compiler)
            joint = shares[key]
        found.append(joint)
    return tuple(found)


def _programs(captured: Captured, joints: Sequence[Joint], dag: Dag) -> tuple[ChunkProgram, ...]:
    """The program of each chunk under the policy that the strategy gives it."""
    made: dict[tuple[int, Remat], ChunkProgram] = {}
    found = []
    for index, joint in enumerate(joints):
        key = (id(joint), dag.policy(index))
        if key not in made:
            made[key] = split(joint, dag.policy(index))
        found.append(made[key])
    return consume_inputs(captured.cut, found)


def _refuse_different(models: Mapping[int, Model], rows: Mapping[int, int]) -> None:
    """The model must have the same chunks at every size of group; ``rows`` is what each of its
    devices has."""
    (size, first), *others = models.items()
    for n, other in others:
        if [_wiring(c) for c in other.chunks] != [_wiring(c) for c in first.chunks]:
            single = [k for k in (size, n) if rows[k] == 1]
            reason = (
                f"of a microbatch each of {single[0]} devices has 1 row, and torch treats "
                "dimensions of size 1 otherwise; give a larger batch or fewer microbatches, or"
                if single
                else "its operations depend on the number of rows;"
            )
            raise PiperError(
                f"the model computes differently on a share of the batch for groups of {n} "
                f"device{'s' * (n > 1)} than for groups of {size}: {reason} give all regions "
                "groups of one size"
            )


def _refuse_other_share(whole: Model, share: Model) -> None:
    """On a share of its experts a region must take and keep what it does with all of them."""
    for mine, other in zip(whole.chunks, share.chunks, strict=True):
        if _wiring(mine) != _wiring(other):
            name = " ".join(f"{k}[{i}]" for k, i in mine.tags.items()) or "model"
            raise PiperError(
                f"region {name} computes differently on a share of its experts: torch treats "
                "dimensions of size 1 otherwise, and there the region has other numbers of experts "
                "and rows; give a larger batch, or shard fewer ways="
            )


def _wiring(chunk: Any) -> object:
    passes = {
        policy: {which: (f.reads, f.writes) for which, f in variant.passes.items()}
        for policy, variant in chunk.variants.items()
    }
    return dict(chunk.tags), chunk.parameters, chunk.inputs, chunk.outputs, passes


def _depends_on_mode(how: _Capture, captured: Captured) -> bool:
    """Whether evaluation computes otherwise than training: both are traced and compared, since the
    mode can be read anywhere. What differs without any reason of the model's own is refused."""
    group = captured.microbatches // how.microbatches
    with _evaluating(how.model, how.loss):
        evaluation = how.traced(group)
    if evaluation == captured.traced:
        return False
    if how.traced(group) != captured.traced:
        raise CaptureError(
            f"{type(how.model).__name__} computes something else each time it is traced, and the "
            "captured step would repeat the first for ever: a number from outside torch is in it "
            "(Python's or numpy's random generator, the time, a counter); draw it with torch.rand, "
            "keep it in a buffer, or pass it with the batch"
        )
    return True


@contextmanager
def _evaluating(model: nn.Module, loss: Callable[..., Any]) -> Iterator[None]:
    """The model in evaluation mode inside; as it was outside."""
    roots = [model] + ([loss] if isinstance(loss, nn.Module) else [])
    modules = [m for root in roots for m in root.modules()]
    before = [m.training for m in modules]
    try:
        for root in roots:
            root.eval()
        yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode


@contextmanager
def _no_collection() -> Iterator[None]:
    """Compiling makes millions of small objects and no cycles worth collecting meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
