"""State that can travel: a device's fragments of parameters and optimizer state, put together to
whole tensors under their original names, and taken apart again."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper.capture.tensors import TensorSpec
from piper.ir.dag import Bucket
from piper.runtime.groups import Group, export_groups
from piper.runtime.layout import BucketLayout, Fragment
from piper.runtime.state import DeviceState, HeldBucket


@dataclass(frozen=True, slots=True)
class Portion:
    """A run of elements of one tensor of the state."""

    name: str
    part: int
    """Which share of the experts it belongs to."""
    offset: int
    data: Tensor


@dataclass(frozen=True, slots=True)
class Portions:
    """What one device gives to the whole."""

    parameters: list[Portion]
    buffers: dict[str, Tensor]
    optimizer: dict[str, list[Portion]]
    """By kind of state, such as ``exp_avg``."""
    numbers: dict[tuple[str, str], Any]
    """State of the optimizer that is no tensor of a parameter's size, by parameter and kind."""
    steps: int
    scheduler: dict[str, Any] | None
    groups: list[Group]
    """The optimizer's groups, with the names of what they hold."""
    kind: str
    """The name of the optimizer's class."""


def export(state: DeviceState, *, optimizer: bool, only: frozenset[str] | None = None) -> Portions:
    """What ``state`` holds that no other device gives: of equal copies the first one's; of the
    tensors named in ``only``, if that is given."""
    parameters: list[Portion] = []
    kinds: dict[str, list[Portion]] = {}
    numbers: dict[tuple[str, str], Any] = {}
    for held in state.held.values():
        layout = held.layout
        if layout.copy > 0:
            continue
        source = held.updated if layout.bucket.trained or held.is_copy else _own_range(held)
        for place, fragment in enumerate(layout.fragments):
            if only is not None and fragment.name not in only:
                continue
            data = source[fragment.start : fragment.stop]
            parameters.append(Portion(fragment.name, layout.part, fragment.offset, data.cpu()))
            if optimizer and state.optimizer is not None and held.trained:
                kept = state.optimizer.state.get(held.trained[place], {})
                for kind, item in kept.items():
                    mine = held.trained[place].shape
                    if isinstance(item, Tensor) and item.shape == mine and kind != "step":
                        flat = _in_memory_order(layout, fragment, item)
                        portion = Portion(fragment.name, layout.part, fragment.offset, flat.cpu())
                        kinds.setdefault(kind, []).append(portion)
                    else:
                        numbers[fragment.name, kind] = item
    buffers = {
        name: x.cpu().clone() for name, x in state.buffers.items() if only is None or name in only
    }
    groups = export_groups(state) if optimizer else []
    scheduler = state.scheduler.state_dict() if state.scheduler is not None else None
    kind = type(state.optimizer).__name__ if state.optimizer is not None else ""
    return Portions(parameters, buffers, kinds, numbers, state.steps, scheduler, groups, kind)


def _own_range(held: HeldBucket) -> Tensor:
    low, high = held.layout.mine
    return held.flat if held.layout.scattered else held.flat[low:high]


def _in_memory_order(layout: BucketLayout, fragment: Fragment, item: Tensor) -> Tensor:
    """State of a whole parameter as a flat row in the order of the parameter's own memory."""
    if layout.sharded:
        return item
    whole = torch.empty(layout.padded, dtype=item.dtype, device=item.device)
    layout.view(whole, fragment.name).copy_(item)
    start = layout.offsets[fragment.name]
    return whole[start : start + item.numel()]


def assemble(
    specs: Mapping[str, TensorSpec], buckets: Iterable[Bucket], portions: Iterable[Portion]
) -> dict[str, Tensor]:
    """Whole tensors from portions, in the shapes of the parameters they belong to."""
    layouts = {name: b for b in buckets for name in b.parameters}
    rows: dict[tuple[str, int], Tensor] = {}
    for portion in portions:
        spec = specs[portion.name]
        size = math.prod(spec.shape) // layouts[portion.name].ways
        key = (portion.name, portion.part)
        if key not in rows:
            rows[key] = torch.empty(size, dtype=portion.data.dtype)
        rows[key][portion.offset : portion.offset + portion.data.numel()] = portion.data
    found: dict[str, Tensor] = {}
    for (name, part), row in rows.items():
        bucket = layouts[name]
        layout = BucketLayout(bucket, {n: specs[n] for n in bucket.parameters}, 0, part)
        if name not in found:
            found[name] = torch.empty(specs[name].shape, dtype=row.dtype)
        layout.put(found[name], layout.shaped(row, name))
    return found


def restore(
    state: DeviceState,
    tensors: Mapping[str, Tensor],
    optimizer: Mapping[str, Mapping[str, Tensor]] | None = None,
    numbers: Mapping[tuple[str, str], Any] | None = None,
) -> None:
    """Take parameters and buffers, and perhaps the optimizer's state, from whole tensors; what is
    not among ``tensors`` stays as it is."""
    kept_there = state.optimizer is not None and any(
        group.get("fused") or group.get("capturable") for group in state.optimizer.param_groups
    )
    for held in state.held.values():
        layout = held.layout
        names = [n for n in layout.bucket.parameters if n in tensors]
        if names:
            _restore_bucket(held, {n: tensors[n] for n in names}, state.where)
        if optimizer is not None and state.optimizer is not None:
            for fragment, parameter in zip(layout.fragments, held.trained, strict=False):
                if fragment.name not in tensors:
                    continue
                state.optimizer.state.pop(parameter, None)
                kept = state.optimizer.state[parameter]
                for kind, whole in optimizer.items():
                    if fragment.name in whole:
                        kept[kind] = _fragment_of(layout, fragment, whole[fragment.name], parameter)
                for (name, kind), item in (numbers or {}).items():
                    if name == fragment.name:
                        if isinstance(item, Tensor):
                            item = item.to(parameter.device if kept_there else "cpu", copy=True)
                        else:  # devices of one process must not share what changes
                            item = copy.deepcopy(item)
                        kept[kind] = item
    for name, buffer in state.buffers.items():
        if name in tensors:
            buffer.copy_(tensors[name])


def _restore_bucket(held: HeldBucket, tensors: Mapping[str, Tensor], where: torch.device) -> None:
    layout = held.layout
    whole = torch.zeros(layout.padded, dtype=layout.bucket.gradient, device=where)
    low, high = layout.mine
    if layout.scattered or held.is_copy:
        whole[low:high].copy_(held.updated)
    else:
        whole.copy_(held.flat)
    for name, tensor in tensors.items():
        layout.view(whole, name).copy_(layout.shard(tensor))
    if layout.scattered or held.is_copy:
        held.updated.copy_(whole[low:high])
    if layout.scattered:
        held.publish()
    else:
        for name in tensors:
            layout.view(held.flat, name).copy_(layout.view(whole, name))


def _fragment_of(layout: BucketLayout, fragment: Fragment, whole: Tensor, like: Tensor) -> Tensor:
    local = layout.shard(whole)
    flat = torch.zeros(layout.padded, dtype=whole.dtype)
    layout.view(flat, fragment.name).copy_(local)
    if not layout.sharded:
        found = layout.view(flat, fragment.name)
    else:
        low, _ = layout.mine
        found = flat[low + fragment.start : low + fragment.stop]
    return found.clone().to(like.device)
