"""Resumes a device from state in files or in other devices' memory.

``refusal`` checks an index, ``wanted`` lists the slices to read and their targets, and ``settle``
completes the state once they are filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from piper.base.errors import PiperError
from piper.ir.grouped import grouped
from piper.state.checkpoint.index import Index, SavedValue
from piper.state.checkpoint.plain_values import from_json, stored_names
from piper.state.checkpoint.slices import MODEL, OPTIMIZER, STORED, Slice
from piper.state.device.bucket_layout import BucketLayout
from piper.state.device.device_state import DeviceState, HeldBucket
from piper.state.device.optimizer_groups import match_groups, restore_groups

Kinds = Mapping[str, Sequence[SavedValue]]
"""The values of a parameter by kind."""


def refusal(state: DeviceState, index: Index) -> str | None:
    """Why this device cannot resume from ``index``; None if it can. Changes nothing."""
    try:
        match_groups(state, index)
        kept = _values_by_name(index)
        for held in state.held.values():
            for name in held.trained:
                _values(held.layout, name, kept.get(index.first(name), {}))
    except PiperError as error:
        return str(error)
    return None


@torch.no_grad()
def wanted(state: DeviceState, index: Index) -> Iterator[Slice]:
    """All slices that this device needs, by their names in ``index``, each once, with the memory to
    fill. Allocates the optimizer's state on the way. Requires that ``refusal`` returned None;
    ``settle`` must follow."""
    kept = _values_by_name(index)
    for held in state.held.values():
        for fragment in held.layout.fragments:
            # with ZeRO, the rest of a parameter is gathered before each use
            yield from _named(held.parameter(fragment), index)
        if state.optimizer is not None:
            yield from _of_optimizer(state, held, index, kept)
    for name, buffer in state.buffers.items():
        first = index.first(name)
        if first in index.model:
            yield Slice.of(MODEL, first, buffer)


def _named(slices: Iterable[Slice], index: Index) -> Iterator[Slice]:
    return (replace(one, name=index.first(one.name)) for one in slices)


@torch.no_grad()
def settle(state: DeviceState, index: Index) -> None:
    """Update the rest of the state after all wanted slices are filled."""
    for held in state.held.values():
        held.publish()
    state.steps = index.steps
    restore_groups(state, index)


def _of_optimizer(
    state: DeviceState, held: HeldBucket, index: Index, values: Mapping[str, Kinds]
) -> Iterator[Slice]:
    assert state.optimizer is not None
    layout = held.layout
    there = any(g.get("fused") or g.get("capturable") for g in state.optimizer.param_groups)
    for own, parameter in held.trained.items():
        before = state.optimizer.state.pop(parameter, {})
        kept = state.optimizer.state[parameter]
        name, fragment = index.first(own), layout.fragment(own)
        for kind, tensors in index.optimizer.items():
            if name in tensors:
                kept[kind] = _like(parameter, tensors[name][0].dtype, before.get(kind))
                table, flat = OPTIMIZER + kind, layout.sliced
                yield from _named(layout.slices(table, fragment, kept[kind], flat=flat), index)
        stored: list[Slice] = []

        def find(key: str, parameter: Tensor = parameter, to: list[Slice] = stored) -> Tensor:
            one = index.tables[STORED][key][0]
            tensor = torch.zeros(one.shape, dtype=one.dtype, device=parameter.device)
            to.append(Slice.of(STORED, key, tensor))
            return tensor

        for kind, value in _values(layout, own, values.get(name, {})).items():
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


def _values_by_name(index: Index) -> dict[str, dict[str, list[SavedValue]]]:
    """The saved values of each parameter, by kind."""
    by_name = grouped((value.name, value) for value in index.values)
    return {name: grouped((x.kind, x) for x in values) for name, values in by_name.items()}


def _values(layout: BucketLayout, name: str, kinds: Kinds) -> dict[str, Any]:
    """By kind, the saved values of a parameter, or of this shard of it."""
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
