"""One device's part of the state: its slices for a checkpoint, an export or other devices; and
resuming from files.

A device gives only its own state; devices with equal copies give a share each. It reads only the
slices it needs, directly into its state. It needs only a few megabytes besides its state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper.base.reading import within
from piper.state.checkpoint.index import GroupEntry, Index, Part, SavedValue
from piper.state.checkpoint.plain_values import to_json
from piper.state.checkpoint.slices import MODEL, OPTIMIZER, STORED, Slice, at_device, covering
from piper.state.checkpoint.tensor_files import Reader, Writer, write_file
from piper.state.device.bucket_layout import BucketLayout, Fragment
from piper.state.device.device_state import DeviceState, HeldBucket
from piper.state.device.optimizer_groups import export_groups
from piper.state.device.restore import settle, wanted
from piper.state.optimizer.factory import kind_of


def given_by(
    state: DeviceState,
    buffers: Collection[str],
    fragments: Callable[[BucketLayout], Iterable[Fragment]] = lambda layout: layout.written,
) -> Part:
    """This device's contribution to the state, with the ``buffers`` assigned to it: its share, or
    other ``fragments``, of each bucket."""
    slices: list[Slice] = []
    values: list[SavedValue] = []
    buckets: list[int | None] = []
    for index, held in state.held.items():
        for part in fragments(held.layout):
            slices += held.parameter(part)
            slices += _like_parameter(state, held, part)
            if not part.offset:
                values += _values(state, held, part.name, slices)
        buckets += [index] * (len(slices) - len(buckets))
    buckets += [None] * len(buffers)
    slices += [Slice.of(MODEL, name, state.buffers[name]) for name in buffers]
    groups = []
    for i, group in enumerate(export_groups(state)):
        with within(f"param_groups[{i}]"):
            settings, schedule = to_json(dict(group.settings)), to_json(dict(group.schedule))
            groups.append(GroupEntry(group.names, settings, schedule))
    scheduler = None
    if state.scheduler is not None:
        with within("scheduler"):
            scheduler = to_json(state.scheduler.state_dict())
    kind = kind_of(state.optimizer) if state.optimizer is not None else ""
    return Part(slices, buckets, tuple(values), tuple(groups), scheduler, kind, state.steps)


def all_held(state: DeviceState) -> Iterator[Slice]:
    """Every slice on this device, including slices that other devices have too. Of parameters, only
    the part it updates: with ZeRO, the rest is gathered before each use and stale between steps."""
    yield from state.model_slices(lambda layout: layout.fragments, state.buffers)
    for held in state.held.values():
        for fragment in held.layout.fragments:
            yield from _like_parameter(state, held, fragment)


def _kept(state: DeviceState, held: HeldBucket, name: str) -> Mapping[str, Any]:
    """The optimizer's state for a parameter."""
    if state.optimizer is None or not held.trained:
        return {}
    kept: Mapping[str, Any] = state.optimizer.state.get(held.trained[name], {})
    return kept


def _is_like(kind: str, item: Any, parameter: Tensor) -> bool:
    return isinstance(item, Tensor) and item.shape == parameter.shape and kind != "step"


def _like_parameter(state: DeviceState, held: HeldBucket, part: Fragment) -> Iterator[Slice]:
    """The slices of a fragment's optimizer state that has the form of its parameter."""
    layout = held.layout
    for kind, item in _kept(state, held, part.name).items():
        if _is_like(kind, item, held.trained[part.name]):
            if layout.sliced:
                first = layout.fragment(part.name).start
                item = item[part.start - first : part.stop - first]
            yield from layout.slices(OPTIMIZER + kind, part, item, flat=layout.sliced)


def _values(
    state: DeviceState, held: HeldBucket, name: str, slices: list[Slice]
) -> Iterator[SavedValue]:
    """The rest of a parameter's optimizer state. Its large tensors are appended to ``slices``."""
    layout = held.layout
    for kind, item in _kept(state, held, name).items():
        if _is_like(kind, item, held.trained[name]):
            continue

        def store(tensor: Tensor, kind: str = kind) -> str:
            key = f"{kind}/{name}/{layout.part}/{len(slices)}"
            slices.append(Slice.of(STORED, key, tensor))
            return key

        with within(f"{kind} of {name}"):
            value = to_json(item, store)
        yield SavedValue(name, kind, layout.part, layout.bucket.ways, value)


def write_part(part: Part, folder: Path, file: str) -> Part:
    """Write a part to a file; returns it as it is there."""
    if not part.slices:
        return replace(part, file=file)
    facts, slices = write_file(folder / file, part.slices)
    return replace(part, slices=slices, buckets=(), file=file, facts=facts)


def in_memory(part: Part, device: int) -> Part:
    """The same part for other processes, as it is in the memory of ``device``."""
    return replace(part, slices=at_device(part.slices, device), buckets=())


def export_part(
    state: DeviceState, folder: Path, targets: Mapping[str, Slice], buffers: Collection[str]
) -> list[str]:
    """Write this device's share of the model's tensors to their places in the exported files.
    Returns their names."""
    slices = state.model_slices(lambda layout: layout.written, buffers)
    mine = [one for one in slices if one.name in targets]
    with Writer.opened(folder) as out:
        for one in mine:
            out.write(one, targets[one.name])
    return list(dict.fromkeys(one.name for one in mine))


@torch.no_grad()
def read_part(state: DeviceState, folder: Path, index: Index) -> None:
    """Resume from a checkpoint. Requires that ``refusal`` returned None. If reading still fails,
    the state is partly changed and ``state.changing`` stays True."""
    state.changing = True
    with Reader(folder) as reader:
        for source, target in covering(wanted(state, index), index.tables):
            reader.copy(source, target.tensor)
    settle(state, index)
    state.changing = False
