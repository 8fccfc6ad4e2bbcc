"""``scheduler=``: a function from an optimizer to a learning-rate scheduler."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from piper.base.errors import PiperError
from piper.base.units import class_text
from piper.state.optimizer.factory import OptimizerFactory, trying
from piper.state.optimizer.probe import TrainedShapes, sample_optimizer

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
            f"returned {class_text(scheduler)}"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise PiperError(
            f"the {type(scheduler).__name__} that scheduler= returned is of another optimizer, "
            "whose learning rates no device trains with: make it from the optimizer that the "
            "function is given, as in lambda optimizer: "
            "torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        )
    needed = [
        name
        for name, p in inspect.signature(step).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise PiperError(
            f"the scheduler {type(scheduler).__name__} needs {', '.join(needed)} at each "
            "step; use one that depends on the number of steps alone"
        )
    return scheduler


def advance(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> None:
    """One step of ``scheduler``, after ``steps`` steps of training."""
    try:
        scheduler.step()
    except ValueError as error:
        raise PiperError(
            f"the {type(scheduler).__name__} of scheduler= has no learning rate after step "
            f"{steps}: {error}. It counts steps, over all epochs: make it for as many as there are"
        ) from error


def try_scheduler(
    factory: OptimizerFactory | None, scheduler: SchedulerFactory | None, trained: TrainedShapes
) -> None:
    """Refuse a scheduler that cannot work, before compilation starts."""
    if factory is not None and scheduler is not None:
        with trying("optimizer="):
            _, optimizer = sample_optimizer(factory, trained)
        with trying("scheduler="):
            make_scheduler(scheduler, optimizer)
