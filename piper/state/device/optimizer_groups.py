"""Saves and restores the settings of an optimizer's parameter groups. Groups differ between
devices, so settings are matched by parameter names."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.state.checkpoint.index import GroupEntry
from piper.state.device.device_state import DeviceState
from piper.state.optimizer.factory import members_of, settings

_KIND = "piper.optimizer"
"""The setting that names the class of a group's optimizer."""
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
"""Scheduler state that is a list with one item for each group."""


def export_groups(state: DeviceState) -> list[GroupEntry]:
    """The groups of a device's optimizer."""
    if state.optimizer is None:
        return []
    schedule = {} if state.scheduler is None else state.scheduler.state_dict()
    return [
        GroupEntry(
            names,
            copy.deepcopy(settings(group)) | {_KIND: kind},
            _of_group(schedule, i),
        )
        for i, (group, names, kind) in enumerate(
            zip(state.optimizer.param_groups, _names(state), _kinds(state), strict=True)
        )
    ]


def match_groups(state: DeviceState, groups: Sequence[GroupEntry]) -> list[GroupEntry | None]:
    """For each group of a device's optimizer, a saved group with some of its parameters, or None.
    All such saved groups must have equal settings."""
    if state.optimizer is None:
        return []
    pairs = zip(_names(state), _kinds(state), strict=True)
    return [_match(names, kind, groups) for names, kind in pairs]


def restore_groups(
    state: DeviceState, groups: Sequence[GroupEntry], schedule: Mapping[str, Any] | None
) -> None:
    """Give each group the settings of the saved group with its parameters."""
    if state.optimizer is None:
        return
    mine = state.optimizer.param_groups
    matches = match_groups(state, groups)
    for group, other in zip(mine, matches, strict=True):
        if other is not None:
            here = group.get("capturable")  # depends on how this run executes: not restored
            group.update({k: copy.deepcopy(v) for k, v in other.settings.items() if k != _KIND})
            if here is not None:
                group["capturable"] = here
    if schedule is not None and state.scheduler is not None:
        own = state.scheduler.state_dict()
        rows = [
            _of_group(own, i) if group is None else group.schedule
            for i, group in enumerate(matches)
        ]
        state.scheduler.load_state_dict(_with_groups(copy.deepcopy(dict(schedule)), rows))


def _names(state: DeviceState) -> list[tuple[str, ...]]:
    """For each group, the names of its parameters."""
    assert state.optimizer is not None
    name_of = {id(p): name for held in state.held.values() for name, p in held.trained.items()}
    groups = state.optimizer.param_groups
    return [tuple(dict.fromkeys(name_of[id(p)] for p in g["params"])) for g in groups]


def _kinds(state: DeviceState) -> list[str]:
    """For each group, the class of its optimizer."""
    assert state.optimizer is not None
    members = members_of(state.optimizer)
    return [type(member).__name__ for member in members for _ in member.param_groups]


def _match(names: tuple[str, ...], kind: str, groups: Sequence[GroupEntry]) -> GroupEntry | None:
    """A saved group with some of these parameters. All such groups must belong to the same class of
    optimizer and have equal settings."""
    wanted = set(names)
    matches = [group for group in groups if not wanted.isdisjoint(group.names)]
    for other in matches:
        if (before := other.settings.get(_KIND, kind)) != kind:
            name = next(n for n in other.names if n in wanted)
            raise PiperError(
                f"in the checkpoint the parameter {name} was trained by {before}, but here by "
                f"{kind}, which cannot continue from its state: give it the same optimizer, or "
                "take over the weights alone with load_state_dict"
            )
    for other in matches[1:]:
        if not same(other.settings, matches[0].settings):
            one, two = (next(n for n in g.names if n in wanted) for g in (matches[0], other))
            raise PiperError(
                f"{one} and {two} were in groups of the optimizer with different settings, but "
                "here they are in one group: group the parameters as they were before, or take "
                "over the weights alone with load_state_dict"
            )
    return matches[0] if matches else None


def same(a: Any, b: Any) -> bool:
    """Whether two settings are equal, including tensors in them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def _of_group(schedule: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A scheduler's state for the group at ``place``, including that of nested schedulers."""
    kept = {
        k: schedule[k][place]
        for k in _BY_GROUP
        if isinstance(schedule.get(k), list) and place < len(schedule[k])
    }
    inner = schedule.get("_schedulers")
    if isinstance(inner, list):
        kept["_schedulers"] = [_of_group(s, place) for s in inner]
    return copy.deepcopy(kept)


def _with_groups(schedule: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A scheduler's state with its lists by group replaced by ``rows``: one for each group of this
    device."""
    for k in _BY_GROUP:
        if isinstance(schedule.get(k), list) and all(k in row for row in rows):
            schedule[k] = [row[k] for row in rows]
    inner = schedule.get("_schedulers")
    if isinstance(inner, list) and all("_schedulers" in row for row in rows):
        schedule["_schedulers"] = [
            _with_groups(dict(s), [row["_schedulers"][i] for row in rows])
            for i, s in enumerate(inner)
        ]
    return schedule
