"""What the compiler must know about an optimizer: its memory cost, and which shards it can update.

Enters: the user's factory and the shapes of the trained parameters. Leaves: an ``OptimizerCost``,
or an error. All facts come from steps on small parameters; there is no list of known optimizers.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from piper.base.errors import DirectiveError, PiperError
from piper.base.tracking import Tracker
from piper.ir.dag.dag import Dag, group_text
from piper.ir.rules import Bucket, OptimizerCost
from piper.state.optimizer.factory import (
    NamedParameters,
    OptimizerFactory,
    kind_of,
    make,
    settings_by_parameter,
    takes_names,
)
from piper.state.optimizer.trials import (
    UNNAMED,
    Samples,
    looks_across,
    looks_at_others,
    only,
    sample,
    small,
    step_with,
    steps_by_bucket,
    works_on_shards,
    works_on_slices,
)

TrainedShapes = Mapping[str, tuple[int, ...]]
"""Shapes of the trained parameters by name, in the model's order."""
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def make_scheduler(
    factory: SchedulerFactory, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    """The scheduler that ``factory`` makes. Its ``step`` must not need arguments."""
    scheduler = factory(optimizer)
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise PiperError(
            "scheduler= must be a function from an optimizer to a learning-rate scheduler; it "
            f"returned a {type(scheduler).__name__}"
        )
    needed = [
        name
        for name, p in inspect.signature(step).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise PiperError(
            f"the scheduler {type(scheduler).__name__} must be told {', '.join(needed)} at each "
            "step; use one that depends on the number of steps alone"
        )
    return scheduler


def sample_optimizer(factory: OptimizerFactory, trained: TrainedShapes) -> torch.optim.Optimizer:
    """An optimizer for small parameters: for all names if the factory takes names, else for one
    matrix."""
    names = trained if takes_names(factory) else {"0": (0, 0)}
    return make(factory, _small(names))


def sample_optimizer_of_all(
    factory: OptimizerFactory, trained: TrainedShapes
) -> tuple[NamedParameters, torch.optim.Optimizer]:
    """Small parameters for all names, and an optimizer for them."""
    given = _small(trained)
    return given, make(factory, given)


def kept_kinds(
    factory: OptimizerFactory, trained: TrainedShapes, device: torch.device
) -> dict[str, frozenset[str]]:
    """For each parameter, the keys of its optimizer state after a step."""
    with _trying("optimizer="), _own_randomness(device):
        kinds = _kinds(factory, trained)
        given = [(k.names[0], nn.Parameter(sample(0, k.shape).to(device))) for k in kinds]
        optimizer = make(factory, given)
        parameters = [parameter for _, parameter in given]
        step_with(optimizer, parameters, [sample(1, k.shape).to(device) for k in kinds])
    kept = (frozenset(map(str, optimizer.state.get(p, {}))) for p in parameters)
    return {name: names for kind, names in zip(kinds, kept, strict=True) for name in kind.names}


def _small(shapes: TrainedShapes) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(sample(0, small(shape)))) for name, shape in shapes.items()]


def try_scheduler(
    factory: OptimizerFactory | None, scheduler: SchedulerFactory | None, trained: TrainedShapes
) -> None:
    """Refuse a scheduler that cannot work, before compilation starts."""
    if factory is not None and scheduler is not None:
        with _trying("optimizer="):
            optimizer = sample_optimizer(factory, trained)
        with _trying("scheduler="):
            make_scheduler(scheduler, optimizer)


@contextmanager
def _trying(argument: str) -> Iterator[None]:
    """Reports exceptions of the user's function, or of its result, as errors of ``argument``."""
    try:
        yield
    except PiperError:
        raise
    except Exception as error:
        raise PiperError(
            f"{argument} failed when it was tried on small parameters, for some steps: "
            f"{type(error).__name__}: {error}. Fix it: it must work for any list of parameters, "
            "made anew each time"
        ) from error


@dataclass(frozen=True, slots=True)
class _Kind:
    """Parameters that a factory treats alike: the same number of dimensions, and the same
    parameter group if the factory takes names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    """The shape of a small sample of this kind."""

    def samples(self, first: int, last: int) -> Samples:
        return [(name, self.shape) for name in self.names[first:last]]


def _kinds(factory: OptimizerFactory, trained: TrainedShapes) -> list[_Kind]:
    given = _small(trained)
    groups: dict[int, int] = {}
    if takes_names(factory):
        made = make(factory, given).param_groups
        groups = {id(p): place for place, group in enumerate(made) for p in group["params"]}
    names_by_kind: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, parameter in given:
        key = (groups.get(id(parameter), 0), tuple(parameter.shape))
        names_by_kind.setdefault(key, []).append(name)
    return [_Kind(tuple(names), shape) for (_, shape), names in names_by_kind.items()]


def _samples(factory: OptimizerFactory, kinds: Sequence[_Kind]) -> Sequence[Samples]:
    """Samples to try a factory with: one parameter of each kind in the first half, a second one of
    each kind in the other half."""
    if not takes_names(factory):
        return UNNAMED
    return ([x for first in (0, 1) for kind in kinds for x in kind.samples(first, first + 1)],)


def cost_of(
    factory: OptimizerFactory | None, trained: TrainedShapes, device: torch.device
) -> OptimizerCost:
    """The optimizer's state size, its temporary memory in an update, whether one ``step`` must
    cover all parameters, and which ``trained`` parameters it needs unsliced. With several kinds of
    parameters: the cost of the most expensive kind."""
    if factory is None or not trained:
        return OptimizerCost(0.0)
    with _trying("optimizer="), _own_randomness(device):
        kinds = _kinds(factory, trained)
        tried = kinds if takes_names(factory) else [_Kind(("0", "1"), small((0, 0)))]
        costs = [_cost(factory, kind, _beside(factory, tried, kind), device) for kind in tried]
        whole = not steps_by_bucket(partial(make, factory), _samples(factory, kinds), device)
        tensors = [
            name
            for kind in kinds
            if not _sliced(factory, kind, _beside(factory, kinds, kind))
            for name in kind.names
        ]
    return OptimizerCost(
        state=max(cost.state for cost in costs),
        update=max(cost.update for cost in costs),
        together=any(cost.together for cost in costs),
        scalars=max(cost.scalars for cost in costs),
        whole=whole,
        tensors=tuple(tensors),
    )


def _beside(
    factory: OptimizerFactory, kinds: Sequence[_Kind], kind: _Kind
) -> list[tuple[str, nn.Parameter]]:
    """One parameter of each other kind: a factory that takes names may need a parameter in every
    group."""
    if not takes_names(factory):
        return []
    return _small({other.names[0]: other.shape for other in kinds if other is not kind})


def _sliced(factory: OptimizerFactory, kind: _Kind, beside: NamedParameters) -> bool:
    return works_on_slices(partial(make, factory), kind.names[0], kind.shape, beside)


def _cost(
    factory: OptimizerFactory,
    kind: _Kind,
    beside: NamedParameters,
    device: torch.device,
) -> OptimizerCost:
    others = [(name, nn.Parameter(p.detach().to(device))) for name, p in beside]
    one = _tried(factory, kind.samples(0, 1), others, device)
    two = _tried(factory, kind.samples(0, 2), others, device)
    return replace(one, together=two.update > 1.5 * one.update)


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside do not change torch's generators outside."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _tried(
    factory: OptimizerFactory,
    samples: Samples,
    beside: NamedParameters,
    device: torch.device,
) -> OptimizerCost:
    """The cost of a step on small parameters. The parameters ``beside`` them are not updated."""
    parameters = [nn.Parameter(sample(0, shape).to(device)) for _, shape in samples]
    gradients = [sample(1, shape).to(device) for _, shape in samples]
    names = [name for name, _ in samples]
    optimizer = make(factory, [*zip(names, parameters, strict=True), *beside])
    step_with(optimizer, parameters, gradients)
    tracker = Tracker()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    with tracker, only(optimizer, parameters):
        optimizer.step()
    state = [x for x in optimizer.state.get(parameters[0], {}).values() if isinstance(x, Tensor)]
    kept = sum(x.nbytes for x in state if x.numel() > 1)
    scalars = sum(x.nbytes for x in state if x.numel() == 1)
    size = parameters[0].nbytes
    return OptimizerCost(kept / size, tracker.peak // size, scalars=scalars)


def check_factory(
    factory: OptimizerFactory,
    cost: OptimizerCost,
    dag: Dag,
    trained: TrainedShapes,
    device: torch.device,
) -> None:
    """Refuse an optimizer that cannot run the lowered step of ``dag``. ``cost`` is the result of
    ``cost_of``."""
    if takes_names(factory):
        _check_made_on_devices(factory, dag, trained)
    else:
        _check_taken(factory, trained)
    with _trying("optimizer="):
        _check_shards(factory, cost, dag, trained)
    _check_across(factory, dag, trained, device)


def _check_shards(
    factory: OptimizerFactory, cost: OptimizerCost, dag: Dag, trained: TrainedShapes
) -> None:
    """Refuse shards of tensors that the optimizer needs whole."""
    tensors = set(cost.tensors)
    kinds = _kinds(factory, trained) if tensors else []
    known: dict[tuple[_Kind, int], bool] = {}
    for bucket in (b for b in dag.buckets if b.trained and b.ways > 1):
        for name in (n for n in bucket.parameters if n in tensors):
            kind = next(kind for kind in kinds if name in kind.names)
            key = (kind, bucket.dim)
            if key not in known:
                beside = _beside(factory, kinds, kind)
                known[key] = works_on_shards(
                    partial(make, factory), kind.names[0], kind.shape, beside, bucket.dim
                )
            if known[key]:
                continue
            chunk = next(c.index for c in dag.model.chunks if name in c.parameters)
            shard = dag.shard(chunk, name)
            assert shard is not None
            raise DirectiveError(
                f"{dag.history[shard.made_by]}: the optimizer {_name(factory, trained)}, as given, "
                f"must have the whole of {name!r}, but each device has one of {bucket.ways} shards "
                f"along dimension {bucket.dim}: do not shard it, or give it an optimizer that "
                "treats each element by itself, such as torch.optim.AdamW (optimizer= may be a "
                "function of named_parameters, and return several optimizers)"
            )


def _check_across(
    factory: OptimizerFactory, dag: Dag, trained: TrainedShapes, device: torch.device
) -> None:
    """Refuse an optimizer that looks at all parameters together if no device has all of them."""
    apart = _apart(dag.buckets)
    if not apart:
        return
    with _trying("optimizer="), _own_randomness(device):
        samples = _samples(factory, _kinds(factory, trained))
        looks = looks_at_others if takes_names(factory) else looks_across
        across = looks(partial(make, factory), samples, device)
    if across:
        raise DirectiveError(
            f"the optimizer {_name(factory, trained)} looks at all parameters together (as for a "
            "norm over all of them, an estimate of the learning rate, or groups by the place in "
            f"the list), but here no device has all: devices {group_text(apart)} have different "
            "ones. Train with it on one device or on replicas with zero=0, or use an optimizer "
            "that treats each parameter "
            "by itself (to clip by the norm of all gradients, give clip_norm= to compile)"
        )


def _apart(buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """All devices, if any of them lacks some of the trained parameters; else none."""
    trained = [b for b in buckets if b.trained]
    owners = [{d for group in b.groups for d in group} for b in trained]
    everyone = set().union(*owners)
    whole = all(h == everyone for h in owners) and not any(b.level or b.ways > 1 for b in trained)
    return () if whole else tuple(sorted(everyone))


def _check_taken(factory: OptimizerFactory, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a factory that cannot make an optimizer for parameters of these shapes. It is tried on
    small parameters with the same numbers of dimensions."""
    names = {len(shape): name for name, shape in reversed(list(shapes.items()))}

    def tried(dimensions: Sequence[int]) -> Exception | None:
        try:
            make(factory, [(str(n), nn.Parameter(sample(0, (4,) * n))) for n in dimensions])
        except PiperError:
            raise
        except Exception as error:  # noqa: BLE001 - any error is reported below
            return error
        return None

    if not names or (error := tried(sorted(names))) is None:
        return
    alone = {n: failure for n in names if (failure := tried([n])) is not None}
    dimensions, error = next(iter(alone.items()), (next(iter(names)), error))
    name = names[dimensions]
    shape = "x".join(map(str, shapes[name])) or "a scalar"
    raise PiperError(
        f"optimizer= cannot make an optimizer for the parameter {name} ({shape}): "
        f"{type(error).__name__}: {error}. It is given every trained parameter, in one list: "
        "return an optimizer that takes all of them, or freeze this one in the model, by "
        "requires_grad_(False), before compiling"
    ) from error


def _check_made_on_devices(factory: OptimizerFactory, dag: Dag, trained: TrainedShapes) -> None:
    """Refuse a factory of named parameters that fails on some device's parameters, or gives them
    other settings there."""
    held: defaultdict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for bucket in (b for b in dag.buckets if b.trained):
        for group in bucket.groups:
            for place, device in enumerate(group):
                for name in bucket.updated_by(place % bucket.within):
                    held[device][name] = (0,) if bucket.sliced else trained[name]
    expected = _settings(factory, trained)
    tried = set()
    for device, shapes in sorted(held.items()):
        if (names := tuple(shapes)) in tried:
            continue
        tried.add(names)
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        try:
            actual = _settings(factory, {name: shapes[name] for name in trained if name in shapes})
        except PiperError:
            raise
        except Exception as error:
            raise PiperError(
                f"optimizer= cannot make an optimizer for the {len(names)} parameters of device "
                f"{device} ({shown}): {type(error).__name__}: {error}. A device has only some of "
                "the parameters, and not of every group: leave out optimizers and groups whose "
                "list is empty"
            ) from error
        for name in names:
            if actual[name] != expected[name]:
                raise DirectiveError(
                    f"optimizer= gives the parameter {name!r} other settings where it is given all "
                    f"parameters than on device {device}, which has only {len(names)} of them, "
                    "perhaps in slices: group them by their names alone"
                )


def _settings(factory: OptimizerFactory, shapes: TrainedShapes) -> dict[str, str]:
    """For each parameter's name, its optimizer and group settings as text."""
    given, optimizer = sample_optimizer_of_all(factory, shapes)
    by_id = settings_by_parameter(optimizer)
    return {name: by_id[id(parameter)] for name, parameter in given}


def _name(factory: OptimizerFactory, trained: TrainedShapes) -> str:
    return kind_of(sample_optimizer(factory, trained))
