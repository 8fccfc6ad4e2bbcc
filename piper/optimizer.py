"""What the compiler must know of an optimizer: how much it takes, and what it may be given.

All is found by trying it on small parameters: there is no list of known optimizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from piper.errors import DirectiveError, PiperError
from piper.ir.dag import Bucket, Dag
from piper.ir.text import group_text
from piper.lower.memory import OptimizerCost
from piper.optimizer_trials import OptimizerFactory as OptimizerFactory
from piper.optimizer_trials import (
    looks_across,
    sample,
    step_with,
    steps_by_bucket,
    works_on_parts,
)
from piper.tracking import Tracker

SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def make(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that ``factory`` makes, which must be one of ``torch.optim``'s kind."""
    found = factory(parameters)
    if not isinstance(found, torch.optim.Optimizer):
        raise PiperError(
            "optimizer= must be a function from a list of parameters to a torch.optim optimizer, "
            f"such as lambda params: torch.optim.AdamW(params, lr=3e-4); it returned a "
            f"{type(found).__name__}"
        )
    if inspect.signature(found.step).parameters.get("closure") is not None:
        closure = inspect.signature(found.step).parameters["closure"]
        if closure.default is inspect.Parameter.empty:
            raise PiperError(
                f"the optimizer {type(found).__name__} evaluates the loss again within a step, "
                "which a compiled step cannot: use one whose step needs no closure"
            )
    _refuse_others(found, parameters)
    return found


def _refuse_others(found: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """An optimizer updates the parameters that it was made for, all of them and no others."""
    given = set(map(id, parameters))
    taken = {id(p) for group in found.param_groups for p in group["params"]}
    name = type(found).__name__
    if not taken <= given:
        raise PiperError(
            f"optimizer= was given {len(given)} parameters, but the {name} that it returned is for "
            f"{len(taken - given)} others, which a compiled step never trains: make it from the "
            "list that the function is given, as in lambda params: torch.optim.AdamW(params, "
            "lr=3e-4), and not from model.parameters()"
        )
    if taken != given:
        raise PiperError(
            f"the {name} that optimizer= returned leaves out {len(given - taken)} of the "
            f"{len(given)} parameters that it was given, which would then never be trained: put "
            "all of them into its groups, and freeze what is not to be trained in the model, by "
            "requires_grad_(False), before compiling"
        )


def make_scheduler(
    factory: SchedulerFactory, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    """The scheduler that ``factory`` makes, which must advance without being told anything."""
    found = factory(optimizer)
    step = getattr(found, "step", None)
    if not callable(step):
        raise PiperError(
            "scheduler= must be a function from an optimizer to a learning-rate scheduler; it "
            f"returned a {type(found).__name__}"
        )
    needed = [
        name
        for name, p in inspect.signature(step).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise PiperError(
            f"the scheduler {type(found).__name__} must be told {', '.join(needed)} at each step; "
            "use one that depends on the number of steps alone"
        )
    return found


def try_scheduler(factory: OptimizerFactory | None, scheduler: SchedulerFactory | None) -> None:
    """Refuse a scheduler that cannot work, before anything is compiled."""
    if factory is not None and scheduler is not None:
        with _trying("optimizer="):
            optimizer = make(factory, [nn.Parameter(sample(0))])
        with _trying("scheduler="):
            make_scheduler(scheduler, optimizer)


@contextmanager
def _trying(argument: str) -> Iterator[None]:
    """Whatever the user's function, or what it made, raises here is told as theirs."""
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


def cost_of(factory: OptimizerFactory | None, device: torch.device) -> OptimizerCost:
    """What the optimizer keeps, what it needs while it updates, and whether it steps as a whole."""
    if factory is None:
        return OptimizerCost(0.0)
    with _trying("optimizer="), _own_randomness(device):
        one = _tried(factory, 1, device)
        two = _tried(factory, 2, device)
        whole = not steps_by_bucket(partial(make, factory), device)
    return replace(one, together=two.update > 1.5 * one.update, whole=whole)


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """What is drawn inside is not missing outside."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _tried(factory: OptimizerFactory, count: int, device: torch.device) -> OptimizerCost:
    """What a step on ``count`` equal parameters takes."""
    parameters = [nn.Parameter(sample(0).to(device)) for _ in range(count)]
    gradients = [sample(1).to(device) for _ in range(count)]
    optimizer = make(factory, parameters)
    step_with(optimizer, parameters, gradients)
    tracker = Tracker()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    with tracker:
        optimizer.step()
    state = [x for x in optimizer.state.get(parameters[0], {}).values() if isinstance(x, Tensor)]
    kept = sum(x.nbytes for x in state if x.numel() > 1)
    scalars = sum(x.nbytes for x in state if x.numel() == 1)
    size = parameters[0].nbytes
    return OptimizerCost(kept / size, tracker.peak // size, scalars=scalars)


def check_factory(
    factory: OptimizerFactory,
    dag: Dag,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
) -> None:
    """Refuse an optimizer for a lowered step whose parameters have these shapes."""
    trained = {name for bucket in dag.buckets if bucket.trained for name in bucket.parameters}
    _check_taken(factory, {name: shape for name, shape in shapes.items() if name in trained})
    _check_divisible(factory, dag, device)


def _check_divisible(factory: OptimizerFactory, dag: Dag, device: torch.device) -> None:
    """Refuse to give an optimizer parts of what it looks at together."""
    sharded = [b for b in dag.buckets if b.trained and b.level]
    with _trying("optimizer="):
        elementwise = not sharded or works_on_parts(partial(make, factory))
    if not elementwise:
        rule = sharded[0].rule
        raise DirectiveError(
            f"{dag.history[rule.made_by]}: the optimizer {_name(factory)}, as given, does not "
            "treat each element of a parameter by itself (or looks at its shape, for instance for "
            f"weight decay), so its state cannot be sharded with zero={rule.zero}: use zero=0 for "
            "these regions, or an elementwise optimizer that treats all parameters alike"
        )
    apart = _apart(dag.buckets)
    if apart:
        with _trying("optimizer="), _own_randomness(device):
            across = looks_across(partial(make, factory), device)
        if across:
            raise DirectiveError(
                f"the optimizer {_name(factory)} looks at all parameters together (as for a norm "
                "over all of them, an estimate of the learning rate, or groups by the place in the "
                f"list), but here no device has all: devices {group_text(apart)} have different "
                "ones. Train with it on one device or on replicas with zero=0, or use an optimizer "
                "that treats each parameter "
                "by itself (to clip by the norm of all gradients, give clip_norm= to compile)"
            )


def _apart(buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """The devices, if not every one of them has all of the trained parameters."""
    trained = [b for b in buckets if b.trained]
    owners = [{d for group in b.groups for d in group} for b in trained]
    everyone = set().union(*owners)
    whole = all(h == everyone for h in owners) and not any(b.level or b.ways > 1 for b in trained)
    return () if whole else tuple(sorted(everyone))


def _check_taken(factory: OptimizerFactory, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse an optimizer that cannot be made for parameters of these shapes: tried on small ones
    with as many dimensions."""
    names = {len(shape): name for name, shape in reversed(list(shapes.items()))}

    def tried(dimensions: Sequence[int]) -> Exception | None:
        try:
            make(factory, [nn.Parameter(sample(0, (4,) * n)) for n in dimensions])
        except PiperError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            return error
        return None

    if not names or (error := tried(sorted(names))) is None:
        return
    alone = {n: found for n in names if (found := tried([n])) is not None}
    dimensions, error = next(iter(alone.items()), (next(iter(names)), error))
    name = names[dimensions]
    shape = "x".join(map(str, shapes[name])) or "a scalar"
    raise PiperError(
        f"optimizer= cannot make an optimizer for the parameter {name} ({shape}): "
        f"{type(error).__name__}: {error}. It is given every trained parameter, in one list: "
        "return an optimizer that takes all of them, or freeze this one in the model, by "
        "requires_grad_(False), before compiling"
    ) from error


def _name(factory: OptimizerFactory) -> str:
    return type(make(factory, [nn.Parameter(sample(0))])).__name__
