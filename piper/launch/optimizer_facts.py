"""Describes a program's optimizer and scheduler as plain data that can be compared.

Their code cannot be compared. So both are built for small parameters and described by their
classes, their settings, the group of each parameter, and the learning rates of the first steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.base.units import class_text
from piper.program.program import Program
from piper.state.optimizer.ema import Averaging
from piper.state.optimizer.factory import kind_of, members_of, settings
from piper.state.optimizer.nature import hooks_of
from piper.state.optimizer.probe import sample_optimizer
from piper.state.optimizer.scheduler import make_scheduler

OptimizerFacts = dict[str, Any]
"""Plain values by readable name."""
_STEPS = 200
"""Steps of the scheduler whose learning rates are compared."""
_APART = ("defaults", "state", "param_groups")
"""Attributes of an optimizer that are not settings, or are compared separately."""


def facts_of(program: Program) -> OptimizerFacts:
    """The facts of a program's optimizer and scheduler."""
    training = program.training
    if training.optimizer is None:
        return {"optimizer": None, "scheduler": None}
    given, optimizer = sample_optimizer(training.optimizer, program.trained)
    names = {parameter: name for name, parameter in given}
    scheduler = None
    if training.scheduler is not None:
        scheduler = make_scheduler(training.scheduler, optimizer)
    facts: OptimizerFacts = {
        "optimizer": kind_of(optimizer),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }
    for member in members_of(optimizer):
        own = {k: x for k, x in vars(member).items() if k not in _APART and "_hooks" not in k}
        for key, value in {**member.defaults, **own}.items():
            facts[f"{type(member).__name__}'s {key}"] = plain(value)
        hooks = [repr(x) if isinstance(x, Averaging) else plain(x) for x in hooks_of(member)]
        facts[f"{type(member).__name__}'s hooks"] = hooks
    groups = optimizer.param_groups
    facts["number of param groups"] = len(groups)
    for place, group in enumerate(groups):
        facts |= {f"{_PLACE}{names[p]}": place for p in group["params"]}
        facts |= {f"{key} of param group {place}": plain(x) for key, x in settings(group).items()}
    if scheduler is not None:
        state = scheduler.state_dict()
        facts |= {f"{type(scheduler).__name__}'s {key}": plain(x) for key, x in state.items()}
        facts[_RATES] = _rates(scheduler, groups)
    return facts


_RATES = "learning rates"
_PLACE = "param group of "


def places_of(facts: OptimizerFacts) -> dict[str, int]:
    """The index of each parameter's group, by parameter name."""
    return {what.removeprefix(_PLACE): x for what, x in facts.items() if what.startswith(_PLACE)}


def difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first fact that differs between ``one`` and ``two``, if any, and its two values."""
    for what in dict.fromkeys((*one, *two)):
        a, b = one.get(what), two.get(what)
        if _equal(a, b):
            continue
        if what == _RATES and a and b:
            step = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if not _equal(x, y))
            return f"learning rate in step {step + 1}", a[step], b[step]
        return what, a, b
    return None


def plain(value: Any) -> Any:
    """``value`` as numbers, strings, lists and dicts; for anything else, the name of its class."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    return class_text(value)


def _rates(
    scheduler: torch.optim.lr_scheduler.LRScheduler, groups: Sequence[Mapping[str, Any]]
) -> list[list[float]]:
    """The learning rates of all groups in the first steps; fewer where the schedule ends."""
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer makes no step in between
        for _ in range(_STEPS):
            rates.append([float(group["lr"]) for group in groups])
            try:
                scheduler.step()
            except Exception:  # noqa: BLE001 - a finite schedule has ended, such as OneCycleLR
                break
    return rates


def _equal(a: Any, b: Any) -> bool:
    """Whether two plain values are equal; floats up to rounding differences between machines."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-15) or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)
