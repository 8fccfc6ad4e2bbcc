"""Settings of the optimizer that differ between a checkpoint and the program that resumes from it:
they are the checkpoint's, with a warning, or the program's on request.

A scheduler changes the learning rate, so with one the initial rates are compared. A new initial
rate scales the present one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from piper.state.checkpoint.index import GroupEntry, Index
from piper.state.checkpoint.plain_values import from_json, to_json

_EXECUTION = ("capturable", "differentiable", "foreach", "fused")
"""Settings that change no number."""
_SCHEDULED = ("lr", "betas", "momentum")
"""Settings that a scheduler may change."""
_RATES = ("base_lrs", "_last_lr")
"""A scheduler's learning rates."""


def changed_settings(index: Index, given: Sequence[GroupEntry]) -> dict[str, tuple[Any, Any]]:
    """By name, the first setting in the checkpoint that is another one in the program, and that."""
    changed: dict[str, tuple[Any, Any]] = {}
    for saved, own in _pairs(index, given):
        for name, values in _differences(saved, own).items():
            changed.setdefault("lr" if name == "initial_lr" else name, values)
    return changed


def with_new_settings(index: Index, given: Sequence[GroupEntry]) -> Index:
    """``index`` with the settings of the program's groups."""
    groups = tuple(_renewed(saved, own) for saved, own in _pairs(index, given))
    return msgspec.structs.replace(index, groups=groups)


def _pairs(index: Index, given: Sequence[GroupEntry]) -> Iterator[tuple[GroupEntry, GroupEntry]]:
    """Each saved group with a group of a device that has some of its parameters, both as Python
    values; the first has the parameters of both."""
    done = set()
    for own in given:
        for saved in index.groups:
            names = tuple(name for name in own.names if name in saved.names)
            if names and names not in done:
                done.add(names)
                settings, schedule = from_json(saved.settings), from_json(saved.schedule)
                yield GroupEntry(names, settings, schedule), own


def _differences(saved: GroupEntry, own: GroupEntry) -> dict[str, tuple[Any, Any]]:
    """The settings that differ: those of ``saved`` and of ``own``."""
    one, two = saved.settings, own.settings
    left_out = {*_EXECUTION, *(_SCHEDULED if "initial_lr" in one and "initial_lr" in two else ())}
    if "initial_lr" not in one and "initial_lr" in two:  # with a scheduler only now
        two = {**two, "lr": two["initial_lr"]}
    names = [name for name in one if name in two and name not in left_out]
    return {n: (one[n], two[n]) for n in names if _plain(one[n]) != _plain(two[n])}


def _renewed(saved: GroupEntry, own: GroupEntry) -> GroupEntry:
    """``saved`` with the settings of ``own``."""
    changed = {name: new for name, (_, new) in _differences(saved, own).items()}
    before = _plain(saved.settings.get("initial_lr"))
    if before is None and "initial_lr" in own.settings:
        changed["lr"] = own.settings["lr"]  # that of a scheduler at its first step
    schedule: Mapping[str, Any] = saved.schedule
    if "initial_lr" in changed and before:
        scale = _plain(changed["initial_lr"]) / before
        changed["lr"] = saved.settings["lr"] * scale
        schedule = _scaled(schedule, scale)
    settings = {**saved.settings, **changed}
    return GroupEntry(saved.names, to_json(settings), to_json(dict(schedule)))


def _scaled(schedule: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """A scheduler's values for a group with its learning rates times ``scale``."""
    scaled = {k: x * scale if k in _RATES else x for k, x in schedule.items()}
    if "_schedulers" in schedule:
        scaled["_schedulers"] = [_scaled(one, scale) for one in schedule["_schedulers"]]
    return scaled


def _plain(value: Any) -> Any:
    """``value``, a number if it is a tensor of one."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
