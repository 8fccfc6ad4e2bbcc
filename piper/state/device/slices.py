"""A device's training state as slices of named tensors, for a checkpoint or for other devices.

Enters: a ``DeviceState``. Leaves: a ``Holding``. Tables have the names of an ``Index``: ``model``,
``optimizer.<kind of state>`` or ``stored``.
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
    """This device's contribution to the state, with the ``buffers`` assigned to it."""
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
    """Every slice on this device, including slices that other devices have too. Of parameters, only
    the part it updates: with ZeRO, the rest is gathered before each use and stale between steps."""
    for held in state.held.values():
        for place, fragment in enumerate(held.layout.fragments):
            yield from _parameter(held, fragment)
            for kind, item in _kept(state, held, place).items():
                if _like_parameter(kind, item, held, place):
                    yield from _of_state(kind, item, held, place, fragment)
    for name, tensor in state.buffers.items():
        yield whole(MODEL, name, tensor)


def _parameter(held: HeldBucket, fragment: Fragment) -> Iterator[Held]:
    """The slices of a parameter's fragment."""
    layout = held.layout
    shape = layout.specs[fragment.name].shape
    row = held.updated[fragment.start : fragment.stop]
    for piece in pieces_of(layout, fragment):
        tensor = piece.of_range(row, layout, fragment)
        yield Held(MODEL, fragment.name, shape, piece.whole, tensor)


def _kept(state: DeviceState, held: HeldBucket, place: int) -> Mapping[str, Any]:
    """The optimizer's state for the fragment at ``place``."""
    if state.optimizer is None or not held.trained:
        return {}
    kept: Mapping[str, Any] = state.optimizer.state.get(held.trained[place], {})
    return kept


def _like_parameter(kind: str, item: Any, held: HeldBucket, place: int) -> bool:
    same = isinstance(item, Tensor) and item.shape == held.trained[place].shape
    return same and kind != "step"


def _of_state(
    kind: str, item: Tensor, held: HeldBucket, place: int, fragment: Fragment
) -> Iterator[Held]:
    """The slices of a fragment's optimizer state, which is flat or has the shard's shape."""
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
    """Optimizer state that is not a tensor of the parameter's shape. Its large tensors are appended
    to ``slices``."""

    def store(tensor: Tensor) -> str:
        key = f"{kind}/{name}/{layout.part}/{len(slices)}"
        slices.append(whole(STORED, key, tensor))
        return key

    with within(f"{kind} of {name}"):
        value = to_json(item, store)
    return SavedValue(name, kind, layout.part, layout.bucket.ways, value)
