"""Moves state between devices, memory to memory, when the strategy changes.

A device copies the slices it already has and receives the rest from the devices that hold them.
Slices travel in parcels of a few megabytes. The sender packs a parcel just before it is sent, and
the receiver unpacks it. So a process holds at most ``IN_FLIGHT`` parcels besides its old and its
new state.

All processes handle the parcels in the same order and wait only for the oldest one. Both ends have
started the first unfinished parcel, so there is no deadlock. In round r, device i sends to the r-th
device after it, so all devices send and receive at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from piper.base.handles import Handle
from piper.state.checkpoint import tensor_files as files
from piper.state.checkpoint.index import Index
from piper.state.checkpoint.slices import Slice, all_slices, by_name, covered, covering, runs

IN_FLIGHT = 4
"""Parcels, of at most ``files.BLOCK`` bytes, that a process holds at a time."""
_ALIGNED = 16
"""Alignment in bytes of every slice in a parcel."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Slices that travel together, from the memory of one device to that of another."""

    source: int
    to: int
    tag: int
    moves: tuple[tuple[Slice, Slice], ...]
    """Pairs of the same box: at the device that has it, and at the device that wants it."""

    @property
    def nbytes(self) -> int:
        return sum(_room(want) for _, want in self.moves)


class Messages(Protocol):
    """Point-to-point messages between any two processes."""

    def send(self, data: Tensor, to: int, tag: int) -> Handle: ...

    def receive(self, out: Tensor, source: int, tag: int) -> Handle: ...


@torch.no_grad()
def still_missing(wants: Iterable[Slice], here: Iterable[Slice]) -> list[Slice]:
    """Copy slices that are ``here`` to their targets. Returns the slices that are not here."""
    known = by_name(here)
    missing = []
    for want in wants:
        boxes = [want.box]
        for one in known.get(want.table, {}).get(want.name, ()):
            for box in boxes:
                for source, target in covered(want.part(box), [one]):
                    target.tensor.copy_(source.tensor)
            boxes = [rest for box in boxes for rest in box.without(one.box)]
        missing += [want.part(box) for box in boxes]
    return missing


@torch.no_grad()
def copied(missing: Iterable[Slice], index: Index, gives: Mapping[int, Sequence[Slice]]) -> None:
    """Copy missing slices from devices of the same process. ``gives`` has each device's slices."""
    for source, target in covering(missing, index.tables):
        place = source.location
        target.tensor.copy_(gives[int(place.file)][place.offset].part(source.box).tensor)


def parcels(index: Index, wants: Mapping[int, Sequence[Slice]], me: int) -> list[Parcel]:
    """The parcels that device ``me`` sends or receives, in the order of all processes. ``wants``
    has every device's missing slices, as ``at_device`` writes them."""
    pairs: dict[tuple[int, int], list[tuple[Slice, Slice]]] = {}
    for to, slices in wants.items():
        for one, want in covering(slices, index.tables):
            source = int(one.location.file)
            if me in (source, to):
                for box in want.box.cut(files.BLOCK // want.dtype.itemsize):
                    pairs.setdefault((source, to), []).append((one.part(box), want.part(box)))
    mine = [
        Parcel(source, to, tag, tuple(run))
        for (source, to), moves in pairs.items()
        for tag, run in enumerate(runs(moves, lambda move: _room(move[1]), files.BLOCK))
    ]
    givers = {int(one.location.file) for one in all_slices(index.tables)}
    places = {device: i for i, device in enumerate(sorted({*wants, *givers}))}

    def turn(parcel: Parcel) -> tuple[int, int, int]:
        rounds = (places[parcel.to] - places[parcel.source]) % len(places)
        return rounds, parcel.tag, parcel.source

    return sorted(mine, key=turn)


def _room(one: Slice) -> int:
    """The bytes of a slice in a parcel."""
    return -(-one.nbytes // _ALIGNED) * _ALIGNED


@torch.no_grad()
def exchange(
    me: int,
    gives: Sequence[Slice],
    missing: Sequence[Slice],
    rows: Iterable[Parcel],
    link: Messages,
) -> None:
    """Send and receive all parcels of the process of device ``me``."""
    under_way: deque[tuple[Parcel, Tensor, Handle]] = deque()

    def finish() -> None:
        parcel, data, handle = under_way.popleft()
        handle.wait()
        if parcel.to == me:
            _unpack(parcel, data, missing)

    for parcel in rows:
        if parcel.source == parcel.to:
            _unpack(parcel, _packed(parcel, gives), missing)
            continue
        if len(under_way) == IN_FLIGHT:
            finish()
        if parcel.source == me:
            data = _packed(parcel, gives)
            handle = link.send(data, parcel.to, parcel.tag)
        else:
            data = torch.empty(parcel.nbytes, dtype=torch.uint8)
            handle = link.receive(data, parcel.source, parcel.tag)
        under_way.append((parcel, data, handle))
    while under_way:
        finish()


def _packed(parcel: Parcel, gives: Sequence[Slice]) -> Tensor:
    data = torch.empty(parcel.nbytes, dtype=torch.uint8)
    for (one, want), slot in _slots(parcel, data):
        slot.copy_(gives[one.location.offset].part(want.box).tensor)
    return data


def _unpack(parcel: Parcel, data: Tensor, missing: Sequence[Slice]) -> None:
    for (_, want), slot in _slots(parcel, data):
        missing[want.location.offset].part(want.box).tensor.copy_(slot)


def _slots(parcel: Parcel, data: Tensor) -> Iterable[tuple[tuple[Slice, Slice], Tensor]]:
    at = 0
    for move in parcel.moves:
        want = move[1]
        yield move, data[at : at + want.nbytes].view(want.dtype).view(want.box.shape)
        at += _room(want)
