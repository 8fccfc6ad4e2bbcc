"""One device's part of a checkpoint: what it writes of its state, and how it reads another's.

A device writes only what it has, and of equal copies each writes a share. It reads just the slices
that it needs, straight to where they are kept: beside its state it holds a few megabytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piper.checkpoint.boxes import Box
from piper.checkpoint.files import FileFacts, Given, Reader, write_file
from piper.checkpoint.index import Entry, GroupEntry, Index, Slice, Tensors, Value
from piper.checkpoint.pretrained import SliceWriter, Target
from piper.checkpoint.values import from_json, stored_names, to_json
from piper.codec import within
from piper.errors import PiperError
from piper.runtime.groups import Group, export_groups, match_groups, restore_groups
from piper.runtime.layout import BucketLayout, Fragment
from piper.runtime.pieces import Piece, pieces_of, whole_shard, written_by
from piper.runtime.state import DeviceState, HeldBucket


@dataclass(frozen=True, slots=True)
class Part:
    """What one device has written."""

    file: str
    facts: FileFacts | None
    """None if it had nothing to write."""
    tensors: Tensors
    groups: tuple[GroupEntry, ...] = ()
    scheduler: Any = None
    kind: str = ""
    steps: int = 0


class Collected:
    """Tensors that are to be written to one file, and the entries that they are slices of."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._given: list[Given] = []
        self._rows: list[tuple[dict[str, Entry], str, Box, tuple[int, ...], Given]] = []
        self.model: dict[str, Entry] = {}
        self.optimizer: dict[str, dict[str, Entry]] = {}
        self.stored: dict[str, Entry] = {}
        self.values: list[Value] = []

    def add(
        self, to: dict[str, Entry], prefix: str, name: str, shape: tuple[int, ...], box: Box,
        tensor: Tensor | Given,
    ) -> None:  # fmt: skip
        """``box`` of the tensor ``name``, whose whole shape is ``shape``."""
        key = prefix + name + ("" if box == Box.whole(shape) else box.text)
        given = tensor if isinstance(tensor, Given) else Given.of(key, tensor)
        self._given.append(given)
        self._rows.append((to, name, box, shape, given))

    def keep(self, name: str, kind: str, layout: BucketLayout, item: Any) -> None:
        """A value of the optimizer's that is no tensor of the parameter's shape."""

        def store(tensor: Tensor) -> str:
            key = f"{kind}/{name}/{layout.part}/{len(self._rows)}"
            whole = tuple(tensor.shape)
            self.add(self.stored, "stored/", key, whole, Box.whole(whole), tensor)
            return key

        with within(f"{kind} of {name}"):
            value = to_json(item, store)
        self.values.append(Value(name, kind, layout.part, layout.bucket.ways, value))

    def write(self, folder: Path) -> tuple[FileFacts | None, Tensors]:
        facts = None
        if self._given:
            written = write_file(folder / self._file, self._given)
            facts = written.facts
            for to, name, box, shape, given in self._rows:
                one = Slice(box, self._file, given.key, *written.tensors[given.key])
                known = to[name].slices if name in to else ()
                to[name] = Entry(given.dtype, shape, (*known, one))
        values = tuple(self.values)
        return facts, Tensors(self.model, self.optimizer, self.stored, values)


def write_part(state: DeviceState, folder: Path, file: str, buffers: Collection[str]) -> Part:
    """Write what this device gives to a checkpoint: its share of parameters and of the optimizer's
    state, and the ``buffers`` that are its to write."""
    found = Collected(file)
    for held in state.held.values():
        for place, fragment in written_by(held.layout):
            _collect(found, state, held, place, fragment)
    for name in buffers:
        tensor = state.buffers[name]
        shape = tuple(tensor.shape)
        found.add(found.model, "", name, shape, Box.whole(shape), tensor)
    groups = tuple(_group_to_json(i, group) for i, group in enumerate(export_groups(state)))
    scheduler = None
    if state.scheduler is not None:
        with within("scheduler"):
            scheduler = to_json(state.scheduler.state_dict())
    kind = type(state.optimizer).__name__ if state.optimizer is not None else ""
    facts, tensors = found.write(folder)
    return Part(file, facts, tensors, groups, scheduler, kind, state.steps)


def _group_to_json(place: int, group: Group) -> GroupEntry:
    with within(f"param_groups[{place}]"):
        return GroupEntry(group.names, to_json(dict(group.settings)), to_json(dict(group.schedule)))


def _collect(
    found: Collected, state: DeviceState, held: HeldBucket, place: int, fragment: Fragment
) -> None:
    layout, name = held.layout, fragment.name
    shape = layout.specs[name].shape
    pieces = pieces_of(layout, fragment)
    row = held.updated[fragment.start : fragment.stop]
    for piece in pieces:
        tensor = piece.of_range(row, layout, fragment)
        found.add(found.model, "", name, shape, piece.whole, tensor)
    if state.optimizer is None or not held.trained:
        return
    parameter = held.trained[place]
    for kind, item in state.optimizer.state.get(parameter, {}).items():
        if isinstance(item, Tensor) and item.shape == parameter.shape and kind != "step":
            entries = found.optimizer.setdefault(kind, {})
            for piece in pieces:
                tensor = _of_state(item, held, place, fragment, piece)
                found.add(entries, f"optimizer/{kind}/", name, shape, piece.whole, tensor)
        elif not fragment.offset:
            found.keep(name, kind, layout, item)


def _of_state(
    item: Tensor, held: HeldBucket, place: int, fragment: Fragment, piece: Piece
) -> Tensor:
    """A piece of what the optimizer keeps for a fragment: a row, or of the shard's shape."""
    if not held.layout.sharded:
        return piece.shard.of(item)
    first = held.layout.fragments[place].start
    row = item[fragment.start - first : fragment.stop - first]
    return piece.of_range(row, held.layout, fragment)


def export_part(
    state: DeviceState, folder: Path, targets: Mapping[str, Target], buffers: Collection[str]
) -> list[str]:
    """Write this device's share of the model's tensors to where they are to lie; their names."""
    found: dict[str, None] = {}
    with SliceWriter.opened(folder) as out:
        for held in state.held.values():
            layout = held.layout
            for _, fragment in written_by(layout):
                if fragment.name not in targets:
                    continue
                row = held.updated[fragment.start : fragment.stop]
                for piece in pieces_of(layout, fragment):
                    tensor = piece.of_range(row, layout, fragment)
                    out.write(targets[fragment.name], piece.whole, tensor)
                found[fragment.name] = None
        for name in buffers:
            if name in targets:
                tensor = state.buffers[name]
                out.write(targets[name], Box.whole(tensor.shape), tensor)
                found[name] = None
    return list(found)


# reading


def refusal(state: DeviceState, index: Index) -> str | None:
    """Why this device cannot go on from a checkpoint, if it cannot; nothing changes."""
    try:
        match_groups(state, groups_of(index))
        kept = _values_by_name(index)
        for held in state.held.values():
            for fragment, _ in zip(held.layout.fragments, held.trained, strict=False):
                _values(held.layout, fragment.name, kept.get(index.first(fragment.name), ()))
    except PiperError as error:
        return str(error)
    return None


def groups_of(index: Index) -> list[Group]:
    return [Group(g.names, from_json(g.settings), from_json(g.schedule)) for g in index.groups]


@torch.no_grad()
def read_part(state: DeviceState, folder: Path, index: Index) -> None:
    """Go on from a checkpoint. ``refusal`` has found nothing; whatever fails all the same leaves
    the state half changed, and said to be so."""
    state.changing = True
    kept = _values_by_name(index)
    with Reader(folder) as reader:
        for held in state.held.values():
            _read_bucket(held, reader, index)
            if state.optimizer is not None:
                _read_state(state, held, reader, index, kept)
        for name, buffer in state.buffers.items():
            if index.first(name) in index.tensors.model:
                index.entry(name).read(reader, Box.whole(buffer.shape), buffer)
    state.steps = index.steps
    schedule = None if index.scheduler is None else from_json(index.scheduler)
    restore_groups(state, groups_of(index), schedule)
    state.changing = False


def _read_bucket(held: HeldBucket, reader: Reader, index: Index) -> None:
    for name, places in held.places().items():
        for box, into in places:
            index.entry(name).read(reader, box, into)
    if held.layout.scattered:
        held.publish()


def _read_row(
    reader: Reader, entry: Entry, layout: BucketLayout, fragment: Fragment, row: Tensor
) -> None:
    for piece in pieces_of(layout, fragment):
        entry.read(reader, piece.whole, piece.of_range(row, layout, fragment))


def _read_state(
    state: DeviceState,
    held: HeldBucket,
    reader: Reader,
    index: Index,
    values: Mapping[str, Sequence[Value]],
) -> None:
    assert state.optimizer is not None
    layout = held.layout
    there = any(g.get("fused") or g.get("capturable") for g in state.optimizer.param_groups)

    def find(key: str) -> Tensor:
        entry = index.tensors.stored[key]
        tensor = torch.zeros(entry.shape, dtype=entry.dtype)
        entry.read(reader, Box.whole(entry.shape), tensor)
        return tensor

    for fragment, parameter in zip(layout.fragments, held.trained, strict=False):
        before = state.optimizer.state.pop(parameter, {})
        kept = state.optimizer.state[parameter]
        name = index.first(fragment.name)
        for kind, entries in index.tensors.optimizer.items():
            if (entry := entries.get(name)) is None:
                continue
            kept[kind] = _like(parameter, entry.dtype, before.get(kind))
            if layout.sharded:
                _read_row(reader, entry, layout, fragment, kept[kind])
                continue
            for piece in whole_shard(layout, fragment.name):
                entry.read(reader, piece.whole, piece.shard.of(kept[kind]))
        for kind, value in _values(layout, fragment.name, values.get(name, ())).items():
            kept[kind] = _moved(from_json(value, find), parameter, counters=there)


def _like(parameter: nn.Parameter, dtype: torch.dtype, before: Any) -> Tensor:
    """A tensor for state of a parameter: the one that was there, if it fits, since memory that is
    freed is not always given back."""
    fits = isinstance(before, Tensor) and before.shape == parameter.shape
    if fits and (before.dtype, before.device) == (dtype, parameter.device):
        return before
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _moved(item: Any, parameter: nn.Parameter, *, counters: bool) -> Any:
    """Large tensors are where the parameter is; ``counters`` are if the update reads them there."""
    if isinstance(item, Tensor):
        return item.to(parameter.device if counters or item.numel() > 1 else "cpu")
    if type(item) in (list, tuple):
        return type(item)(_moved(x, parameter, counters=counters) for x in item)
    return item


def _values_by_name(index: Index) -> dict[str, list[Value]]:
    found: dict[str, list[Value]] = {}
    for value in index.tensors.values:
        found.setdefault(value.name, []).append(value)
    return found


def _values(layout: BucketLayout, name: str, rows: Sequence[Value]) -> dict[str, Any]:
    """By kind, what was kept of a parameter, or of this shard of it."""
    kinds: dict[str, list[Value]] = {}
    for value in rows:
        kinds.setdefault(value.kind, []).append(value)
    found = {}
    for kind, values in kinds.items():
        mine = [v for v in values if (v.part, v.ways) == (layout.part, layout.bucket.ways)]
        if not mine and any(v.value != values[0].value or stored_names(v.value) for v in values):
            raise PiperError(
                f"the optimizer's {kind} of {name} was kept for each of {values[0].ways} shards of "
                f"it, but here it has {layout.bucket.ways}, and what is kept has not the "
                "parameter's shape: load it under a strategy that shards it alike, or take over "
                "the weights alone with load_state_dict"
            )
        found[kind] = (mine or values)[0].value
    return found
