"""What a device has of the state of training, as slices of named tensors, wherever they go: to a
file of a checkpoint, or to other devices.

A table is ``model``, ``optimizer.`` and a kind of its state, or ``stored``, as an index calls them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from piper.base.reading import within
from piper.state.checkpoint.index import GroupEntry, SavedValue
from piper.state.checkpoint.plain_values import to_json
from piper.state.device.bucket_layout import BucketLayout, Fragment
from piper.state.device.device_state import DeviceState, HeldBucket
from piper.state.device.holding import MODEL, STORED, Held, Holding, whole
from piper.state.device.optimizer_groups import export_groups
from piper.state.device.pieces import Piece, pieces_of, written_by
from piper.state.optimizer.factory import kind_of


def given_by(state: DeviceState, buffers: Collection[str]) -> Holding:
    """What this device gives of the state, and the ``buffers`` that are its to give."""
    slices: list[Held] = []
    values: list[SavedValue] = []
    buckets: list[int | None] = []
    for index, held in state.held.items():
        for place, fragment in written_by(held.layout):
            slices += _parameter(held, fragment)
            for kind, item in _kept(state, held, place).items():
                if _like_parameter(kind, item, held, place):
                    slices += _of_state(kind, item, held, place, fragment)
                elif not fragment.offset:
                    values.append(_value(slices, fragment.name, kind, held.layout, item))
        buckets += [index] * (len(slices) - len(buckets))
    buckets += [None] * len(buffers)
    slices += [whole(MODEL, name, state.buffers[name]) for name in buffers]
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
    return Holding(slices, buckets, tuple(values), tuple(groups), scheduler, kind, state.steps)


def all_held(state: DeviceState) -> Iterator[Held]:
    """Every slice that this device has, also what others have too. Of a parameter that is what it
    updates: with ZeRO, the rest is gathered before each use, and not current between steps."""
    for held in state.held.values():
        for place, fragment in enumerate(held.layout.fragments):
            yield from _parameter(held, fragment)
            for kind, item in _kept(state, held, place).items():
                if _like_parameter(kind, item, held, place):
                    yield from _of_state(kind, item, held, place, fragment)
    for name, tensor in state.buffers.items():
        yield whole(MODEL, name, tensor)


def _parameter(held: HeldBucket, fragment: Fragment) -> Iterator[Held]:
    """The boxes of a fragment."""
    layout = held.layout
    shape = layout.specs[fragment.name].shape
    row = held.updated[fragment.start : fragment.stop]
    for piece in pieces_of(layout, fragment):
        tensor = piece.of_range(row, layout, fragment)
        yield Held(MODEL, fragment.name, shape, piece.whole, tensor)


def _kept(state: DeviceState, held: HeldBucket, place: int) -> Mapping[str, Any]:
    """What the optimizer keeps for the fragment at ``place``."""
    if state.optimizer is None or not held.trained:
        return {}
    found: Mapping[str, Any] = state.optimizer.state.get(held.trained[place], {})
    return found


def _like_parameter(kind: str, item: Any, held: HeldBucket, place: int) -> bool:
    same = isinstance(item, Tensor) and item.shape == held.trained[place].shape
    return same and kind != "step"


def _of_state(
    kind: str, item: Tensor, held: HeldBucket, place: int, fragment: Fragment
) -> Iterator[Held]:
    """What the optimizer keeps for a fragment: a row, or of the shard's shape."""
    layout = held.layout
    shape = layout.specs[fragment.name].shape
    for piece in pieces_of(layout, fragment):
        tensor = _piece_of_state(item, layout, place, fragment, piece)
        yield Held(f"optimizer.{kind}", fragment.name, shape, piece.whole, tensor)


def _piece_of_state(
    item: Tensor, layout: BucketLayout, place: int, fragment: Fragment, piece: Piece
) -> Tensor:
    if not layout.sliced:
        return piece.shard.of(item)
    first = layout.fragments[place].start
    row = item[fragment.start - first : fragment.stop - first]
    return piece.of_range(row, layout, fragment)


def _value(slices: list[Held], name: str, kind: str, layout: BucketLayout, item: Any) -> SavedValue:
    """A value of the optimizer's that is no tensor of the parameter's shape; large tensors in it
    are among ``slices``."""

    def store(tensor: Tensor) -> str:
        key = f"{kind}/{name}/{layout.part}/{len(slices)}"
        slices.append(whole(STORED, key, tensor))
        return key

    with within(f"{kind} of {name}"):
        value = to_json(item, store)
    return SavedValue(name, kind, layout.part, layout.bucket.ways, value)
