"""What the compiler must know of an optimizer: how much it takes, and whether it may see parts.

Both are found by trying it on a small parameter: no list of known optimizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from piper.errors import DirectiveError, PiperError
from piper.ir.dag import Dag
from piper.lower.memory import OptimizerCost
from piper.tracking import Tracker

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

_ROWS, _COLUMNS = 16, 16


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
    return found


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
        make_scheduler(scheduler, make(factory, [nn.Parameter(_sample(0))]))


def cost_of(factory: OptimizerFactory | None, device: torch.device) -> OptimizerCost:
    """What the optimizer keeps, and what it needs while it updates."""
    if factory is None:
        return OptimizerCost(0.0)
    one = _tried(factory, 1, device)
    two = _tried(factory, 2, device)
    return replace(one, together=two.update > 1.5 * one.update)


def _tried(factory: OptimizerFactory, count: int, device: torch.device) -> OptimizerCost:
    """What a step on ``count`` equal parameters takes."""
    parameters = [nn.Parameter(_sample(0).to(device)) for _ in range(count)]
    gradients = [_sample(1).to(device) for _ in range(count)]
    optimizer = make(factory, parameters)
    try:
        _step(optimizer, parameters, gradients)
        tracker = Tracker()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with tracker:
            optimizer.step()
    except RuntimeError as error:
        name = type(optimizer).__name__
        raise PiperError(
            f"the optimizer {name} cannot update a plain parameter: {error}"
        ) from error
    state = [x for x in optimizer.state.get(parameters[0], {}).values() if isinstance(x, Tensor)]
    kept = sum(x.nbytes for x in state if x.numel() > 1)
    scalars = sum(x.nbytes for x in state if x.numel() == 1)
    size = parameters[0].nbytes
    return OptimizerCost(kept / size, tracker.peak // size, scalars=scalars)


def check_divisible(factory: OptimizerFactory, dag: Dag) -> None:
    """Refuse to divide state of an optimizer that looks at a parameter as a whole."""
    divided = [b for b in dag.buckets if b.trained and b.level]
    if not divided or _works_on_parts(factory):
        return
    rule = divided[0].rule
    name = type(make(factory, [nn.Parameter(_sample(0))])).__name__
    raise DirectiveError(
        f"{dag.history[rule.made_by]}: the optimizer {name}, as given, does not treat each element "
        "of a parameter by itself (or looks at its shape, for instance for weight decay), so its "
        f"state cannot be divided with zero={rule.zero}: use zero=0 for these regions, or an "
        "elementwise optimizer that treats all parameters alike"
    )


def _works_on_parts(factory: OptimizerFactory) -> bool:
    """Whether two steps on a matrix equal two steps on its halves, each a flat row."""
    whole = nn.Parameter(_sample(0))
    halves = [nn.Parameter(part.clone()) for part in _sample(0).flatten().chunk(2)]
    try:
        first, second = make(factory, [whole]), make(factory, halves)
        for seed in (1, 2):
            gradient = _sample(seed)
            _step(first, [whole], [gradient])
            _step(second, halves, list(gradient.flatten().chunk(2)))
    except (RuntimeError, ValueError, TypeError):
        return False
    return torch.allclose(whole.detach().flatten(), torch.cat([h.detach() for h in halves]))


def _sample(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_ROWS, _COLUMNS, generator=generator)


def _step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[Tensor]
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
