"""``optimizer=``: a function that takes parameters, or named parameters, and returns optimizers.

    lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)

    def optimizer(named_parameters):  # recognised by the name of its first argument
        hidden = [p for name, p in named_parameters if is_hidden(name)]
        others = [p for name, p in named_parameters if not is_hidden(name)]
        return [torch.optim.Muon(hidden), torch.optim.AdamW(others)]

The result is always one optimizer. It updates exactly the parameters that the function was given.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from piper.base.errors import PiperError
from piper.base.units import class_text

NamedParameters = Sequence[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[
    [list[Any]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
]  # takes parameters, or (name, parameter) pairs

_NAMED = "named_parameters"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def takes_names(factory: OptimizerFactory) -> bool:
    """Whether the factory takes (name, parameter) pairs."""
    try:
        return next(iter(inspect.signature(factory).parameters), None) == _NAMED
    except (TypeError, ValueError):  # a callable without a signature
        return False


def make(factory: OptimizerFactory, parameters: NamedParameters) -> torch.optim.Optimizer:
    """The optimizer that ``factory`` returns. Several are wrapped into one that steps them all."""
    names = takes_names(factory)
    returned: Any = factory(list(parameters) if names else [p for _, p in parameters])
    members = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not members:
        raise PiperError("optimizer= returned an empty list: it must make at least one optimizer")
    for member in members:
        _refuse_other_kinds(member)
    _refuse_others(members, {p: name if names else "" for name, p in parameters})
    return members[0] if len(members) == 1 else Several(members)


class Several(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters that step as one. It shares its parameter groups
    and state with its members: the same objects."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(members[0].param_groups, {})
        self.members = tuple(members)
        self.param_groups = [group for member in members for group in member.param_groups]
        for member in members:
            self.state.update(member.state)
            member.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closures here
        for member in self.members:
            if any(group["params"] for group in member.param_groups):
                member.step()


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that the user made."""
    return optimizer.members if isinstance(optimizer, Several) else (optimizer,)


def kind_of(*optimizers: torch.optim.Optimizer) -> str:
    """Class names of all member optimizers: sorted, without duplicates, joined by "and"."""
    return joined_kinds(
        type(member).__name__ for optimizer in optimizers for member in members_of(optimizer)
    )


def joined_kinds(kinds: Any) -> str:
    """Joins class names. Names that this function already joined are split first."""
    return " and ".join(sorted({name for kind in kinds for name in kind.split(" and ") if name}))


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


@contextmanager
def regrouped(
    optimizer: torch.optim.Optimizer, changes: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Changes some entries of each parameter group inside: ``step`` visits all parameters in it."""
    pairs = list(zip(optimizer.param_groups, changes, strict=True))
    usual = [{key: group[key] for key in change} for group, change in pairs]
    try:
        for group, change in pairs:
            group.update(change)
        yield
    finally:
        for (group, _), before in zip(pairs, usual, strict=True):
            group.update(before)


def settings_by_name(given: NamedParameters, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """For each parameter's name, its optimizer class and group settings, as text to compare: that
    of a function, for instance, without its address."""
    text = {
        parameter: _ADDRESS.sub("", f"{type(member).__name__} {sorted(settings(group).items())!r}")
        for member in members_of(optimizer)
        for group in member.param_groups
        for parameter in group["params"]
    }
    return {name: text[parameter] for name, parameter in given}


@contextmanager
def trying(argument: str, device: torch.device | None = None) -> Iterator[None]:
    """Reports exceptions of the user's function, or of its result, as errors of ``argument``.
    Random numbers drawn inside do not change torch's generators outside."""
    try:
        with torch.random.fork_rng([device] if device and device.type == "cuda" else []):
            yield
    except PiperError:
        raise
    except Exception as error:
        raise PiperError(
            f"{argument} failed in a trial on small parameters: "
            f"{type(error).__name__}: {error}. Fix it: it must work for any list of parameters, "
            "made anew each time"
        ) from error


def _refuse_other_kinds(member: object) -> None:
    if not isinstance(member, torch.optim.Optimizer):
        raise PiperError(
            "optimizer= must be a function from a list of parameters to a torch.optim optimizer, "
            "or to a list of several, such as lambda params: torch.optim.AdamW(params, lr=3e-4); "
            f"it returned {class_text(member)}"
        )
    closure = inspect.signature(member.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PiperError(
            f"the optimizer {type(member).__name__} evaluates the loss again within a step, "
            "which a compiled step cannot: use one whose step needs no closure"
        )


def _refuse_others(members: Sequence[torch.optim.Optimizer], given: Mapping[Any, str]) -> None:
    """Together the optimizers must update every given parameter exactly once, and no others."""
    taken = Counter(p for x in members for group in x.param_groups for p in group["params"])
    kind = kind_of(*members)
    if others := taken.keys() - given.keys():
        raise PiperError(
            f"optimizer= was given {len(given)} parameters, but the {kind} that it returned is for "
            f"{len(others)} others, which a compiled step never trains: make it from the "
            "list that the function is given, as in lambda params: torch.optim.AdamW(params, "
            "lr=3e-4), and not from model.parameters()"
        )
    if left := [name for key, name in given.items() if key not in taken]:
        raise PiperError(
            f"the {kind} that optimizer= returned leaves out {len(left)} of the "
            f"{len(given)} parameters that it was given{_shown(left)}, which would then never be "
            "trained: put all of them into its groups, and freeze what is not to be trained in the "
            "model, by requires_grad_(False), before compiling"
        )
    if twice := [given[key] for key, times in taken.items() if times > 1]:
        raise PiperError(
            f"optimizer= puts {len(twice)} of its parameters{_shown(twice)} into several "
            f"optimizers ({kind}), each of which would update them: put each into one"
        )


def _shown(names: Sequence[str]) -> str:
    """The first three names in parentheses; empty for a factory that takes no names."""
    return f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names[0] else ""
