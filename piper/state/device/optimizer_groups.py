"""Saves and restores the settings of an optimizer's parameter groups. Groups differ between
devices, so settings are matched by parameter names."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from piper.base.errors import PiperError
from piper.state.checkpoint.index import GroupEntry, Index
from piper.state.checkpoint.plain_values import from_json
from piper.state.device.device_state import DeviceState
from piper.state.optimizer.factory import members_of, settings

_KIND = "piper.optimizer"
"""The setting that names the class of a group's optimizer."""
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
"""Scheduler state that is a list with one item for each group."""


def export_groups(state: DeviceState) -> list[GroupEntry]:
    """The groups of a device's optimizer."""
    schedule = {} if state.scheduler is None else state.scheduler.state_dict()
    return [
        GroupEntry(names, copy.deepcopy(settings(group)) | {_KIND: kind}, _of_group(schedule, i))
        for i, (group, names, kind) in enumerate(_groups(state))
    ]


def match_groups(state: DeviceState, index: Index) -> list[GroupEntry | None]:
    """For each group of a device's optimizer, a saved group with some of its parameters, or None.
    All such saved groups must have equal settings."""
    return [_match(names, kind, index.groups) for _, names, kind in _groups(state)]


def restore_groups(state: DeviceState, index: Index) -> None:
    """Give each group the settings of the saved group with its parameters."""
    matches = match_groups(state, index)
    for (group, _, _), other in zip(_groups(state), matches, strict=True):
        if other is not None:
            here = group.get("capturable")  # depends on how this run executes: not restored
            group.update({k: v for k, v in from_json(other.settings).items() if k != _KIND})
            if here is not None:
                group["capturable"] = here
    if index.scheduler is not None and state.scheduler is not None:
        own = state.scheduler.state_dict()
        rows = [
            _of_group(own, i) if group is None else from_json(group.schedule)
            for i, group in enumerate(matches)
        ]
        state.scheduler.load_state_dict(_with_groups(from_json(index.scheduler), rows))


def _groups(state: DeviceState) -> list[tuple[dict[str, Any], tuple[str, ...], str]]:
    """The groups of a device's optimizer, each with the names of its parameters and the class of
    its optimizer."""
    if state.optimizer is None:
        return []
    name_of = {p: name for held in state.held.values() for name, p in held.trained.items()}
    return [
        (group, tuple(dict.fromkeys(name_of[p] for p in group["params"])), type(member).__name__)
        for member in members_of(state.optimizer)
        for group in member.param_groups
    ]


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
        if other.settings != matches[0].settings:
            one, two = (next(n for n in g.names if n in wanted) for g in (matches[0], other))
            raise PiperError(
                f"{one} and {two} were in groups of the optimizer with different settings, but "
                "here they are in one group: group the parameters as they were before, or take "
                "over the weights alone with load_state_dict"
            )
    return matches[0] if matches else None


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
