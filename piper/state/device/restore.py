"""Resumes a device from state in files or in other devices' memory.

``refusal`` checks an index, ``wanted`` lists the slices to read and their targets, and ``settle``
completes the state once they are filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.state.checkpoint.boxes import Box
from piper.state.checkpoint.index import Index, SavedValue
from piper.state.checkpoint.plain_values import from_json, stored_names
from piper.state.device.bucket_layout import BucketLayout, Fragment
from piper.state.device.device_state import DeviceState, HeldBucket
from piper.state.device.holding import MODEL, STORED
from piper.state.device.optimizer_groups import OptimizerGroup, match_groups, restore_groups
from piper.state.device.pieces import pieces_of, whole_shard


@dataclass(frozen=True, slots=True)
class Wanted:
    """A slice of a named tensor, and the memory to fill with it."""

    table: str
    name: str
    box: Box
    into: Tensor


def refusal(state: DeviceState, index: Index) -> str | None:
    """Why this device cannot resume from ``index``; None if it can. Changes nothing."""
    try:
        match_groups(state, groups_of(index))
        kept = _values_by_name(index)
        for held in state.held.values():
            for fragment, _ in zip(held.layout.fragments, held.trained, strict=False):
                _values(held.layout, fragment.name, kept.get(index.first(fragment.name), ()))
    except PiperError as error:
        return str(error)
    return None


def groups_of(index: Index) -> list[OptimizerGroup]:
    return [
        OptimizerGroup(g.names, from_json(g.settings), from_json(g.schedule)) for g in index.groups
    ]


@torch.no_grad()
def wanted(state: DeviceState, index: Index) -> Iterator[Wanted]:
    """All slices that this device needs, each once. Allocates the optimizer's state on the way.
    Requires that ``refusal`` returned None; ``settle`` must follow."""
    kept = _values_by_name(index)
    for held in state.held.values():
        yield from _of_bucket(held, index)
        if state.optimizer is not None:
            yield from _of_optimizer(state, held, index, kept)
    for name, buffer in state.buffers.items():
        first = index.first(name)
        if first in index.tensors.model:
            yield Wanted(MODEL, first, Box.whole(buffer.shape), buffer)


@torch.no_grad()
def settle(state: DeviceState, index: Index) -> None:
    """Update the rest of the state after all wanted slices are filled."""
    for held in state.held.values():
        held.publish()
    state.steps = index.steps
    schedule = None if index.scheduler is None else from_json(index.scheduler)
    restore_groups(state, groups_of(index), schedule)


def _of_bucket(held: HeldBucket, index: Index) -> Iterator[Wanted]:
    """The part of the bucket that this device updates. With ZeRO, the rest is gathered before each
    use."""
    layout = held.layout
    for fragment in layout.fragments:
        row = held.updated[fragment.start : fragment.stop]
        yield from _row(MODEL, index, layout, fragment, row)


def _row(
    table: str, index: Index, layout: BucketLayout, fragment: Fragment, row: Tensor
) -> Iterator[Wanted]:
    for piece in pieces_of(layout, fragment):
        into = piece.of_range(row, layout, fragment)
        yield Wanted(table, index.first(fragment.name), piece.whole, into)


def _of_optimizer(
    state: DeviceState, held: HeldBucket, index: Index, values: Mapping[str, Sequence[SavedValue]]
) -> Iterator[Wanted]:
    assert state.optimizer is not None
    layout = held.layout
    there = any(g.get("fused") or g.get("capturable") for g in state.optimizer.param_groups)
    for fragment, parameter in zip(layout.fragments, held.trained, strict=False):
        before = state.optimizer.state.pop(parameter, {})
        kept = state.optimizer.state[parameter]
        name = index.first(fragment.name)
        for kind, entries in index.tensors.optimizer.items():
            if (entry := entries.get(name)) is None:
                continue
            table = f"optimizer.{kind}"
            kept[kind] = _like(parameter, entry.dtype, before.get(kind))
            if layout.sliced:
                yield from _row(table, index, layout, fragment, kept[kind])
                continue
            for piece in whole_shard(layout, fragment.name):
                yield Wanted(table, name, piece.whole, piece.shard.of(kept[kind]))
        stored: list[Wanted] = []

        def find(key: str, parameter: Tensor = parameter, to: list[Wanted] = stored) -> Tensor:
            entry = index.tensors.stored[key]
            tensor = torch.zeros(entry.shape, dtype=entry.dtype, device=parameter.device)
            to.append(Wanted(STORED, key, Box.whole(entry.shape), tensor))
            return tensor

        for kind, value in _values(layout, fragment.name, values.get(name, ())).items():
            kept[kind] = _moved(from_json(value, find), parameter, counters=there)
        yield from stored


def _like(parameter: nn.Parameter, dtype: torch.dtype, before: Any) -> Tensor:
    """A tensor for a parameter's optimizer state. Reuses ``before`` if it fits, since freed memory
    is not always returned."""
    fits = isinstance(before, Tensor) and before.shape == parameter.shape
    if fits and (before.dtype, before.device) == (dtype, parameter.device):
        return before
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _moved(item: Any, parameter: nn.Parameter, *, counters: bool) -> Any:
    """``item`` with large tensors on the parameter's device. Tensors with one element go there only
    if ``counters``: if the update reads them on the device."""
    if isinstance(item, Tensor):
        return item.to(parameter.device if counters or item.numel() > 1 else "cpu")
    if type(item) in (list, tuple):
        return type(item)(_moved(x, parameter, counters=counters) for x in item)
    return item


def _values_by_name(index: Index) -> dict[str, list[SavedValue]]:
    by_name: dict[str, list[SavedValue]] = {}
    for value in index.tensors.values:
        by_name.setdefault(value.name, []).append(value)
    return by_name


def _values(layout: BucketLayout, name: str, rows: Sequence[SavedValue]) -> dict[str, Any]:
    """By kind, the saved values of a parameter, or of this shard of it."""
    kinds: dict[str, list[SavedValue]] = {}
    for value in rows:
        kinds.setdefault(value.kind, []).append(value)
    chosen = {}
    for kind, values in kinds.items():
        mine = [v for v in values if (v.part, v.ways) == (layout.part, layout.bucket.ways)]
        if not mine and any(v.value != values[0].value or stored_names(v.value) for v in values):
            raise PiperError(
                f"the optimizer's {kind} of {name} was kept for each of {values[0].ways} shards of "
                f"it, but here it has {layout.bucket.ways}, and this state does not have the "
                "parameter's shape: resume under a strategy that shards it alike, or take over "
                "the weights alone with load_state_dict"
            )
        chosen[kind] = (mine or values)[0].value
    return chosen
