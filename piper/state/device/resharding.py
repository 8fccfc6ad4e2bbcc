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
from piper.state.checkpoint.boxes import Box
from piper.state.checkpoint.index import Index
from piper.state.device.holding import Held
from piper.state.device.restore import Wanted

IN_FLIGHT = 4
"""Parcels, of at most ``files.BLOCK`` bytes, that a process holds at a time."""
_ALIGNED = 16
"""Alignment in bytes of every slice in a parcel."""


@dataclass(frozen=True, slots=True)
class Request:
    """A slice that a device needs from others."""

    table: str
    name: str
    box: Box
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SliceTransfer:
    """The transfer of one slice from one device to another."""

    number: int
    """Index of the sender's slice in its holding."""
    sent: Box
    """The transferred box, relative to that slice."""
    request: int
    """Index of the receiver's request."""
    received: Box
    """The transferred box, relative to that request."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return -(-self.sent.numel * self.dtype.itemsize // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, slots=True)
class Parcel:
    """Slices that travel together."""

    source: int
    to: int
    tag: int
    moves: tuple[SliceTransfer, ...]

    @property
    def nbytes(self) -> int:
        return sum(move.nbytes for move in self.moves)


class Messages(Protocol):
    """Point-to-point messages between any two processes."""

    def send(self, data: Tensor, to: int, tag: int) -> Handle: ...

    def receive(self, out: Tensor, source: int, tag: int) -> Handle: ...


@torch.no_grad()
def still_missing(wants: Iterable[Wanted], here: Iterable[Held]) -> list[Wanted]:
    """Copy slices that are ``here`` to their targets. Returns the slices that are not here."""
    known: dict[tuple[str, str], list[Held]] = {}
    for held in here:
        known.setdefault((held.table, held.name), []).append(held)
    missing = []
    for one in wants:
        boxes = [one.box]
        for held in known.get((one.table, one.name), ()):
            assert isinstance(held.tensor, Tensor)
            for box in boxes:
                if (common := box.common(held.box)) is not None:
                    source = common.seen_from(held.box).of(held.tensor)
                    common.seen_from(one.box).of(one.into).copy_(source)
            boxes = [rest for box in boxes for rest in box.without(held.box)]
        for box in boxes:
            into = box.seen_from(one.box).of(one.into)
            missing.append(Wanted(one.table, one.name, box, into))
    return missing


@torch.no_grad()
def copied(missing: Iterable[Wanted], index: Index, gives: Mapping[int, Sequence[Held]]) -> None:
    """Copy missing slices from devices of the same process. ``gives`` has each device's slices."""
    tables = dict(index.tensors.tables())
    for one in missing:
        for box, stored in tables[one.table][one.name].within(one.box):
            tensor = gives[int(stored.file)][stored.offset].tensor
            assert isinstance(tensor, Tensor)
            source = box.seen_from(stored.box).of(tensor)
            box.seen_from(one.box).of(one.into).copy_(source)


def requests(missing: Sequence[Wanted]) -> list[Request]:
    """The missing slices in a form that other processes can read."""
    return [Request(x.table, x.name, x.box, x.into.dtype) for x in missing]


def parcels(index: Index, wanted: Mapping[int, Sequence[Request]], me: int) -> list[Parcel]:
    """The parcels that ``me`` sends or receives, in order. ``wanted``: every device's requests."""
    pairs: dict[tuple[int, int], list[SliceTransfer]] = {}
    tables = dict(index.tensors.tables())
    for to, rows in wanted.items():
        for number, request in enumerate(rows):
            entry = tables[request.table][request.name]
            for box, stored in entry.within(request.box):
                source = int(stored.file)
                if me not in (source, to):
                    continue
                for part in box.cut(files.BLOCK // request.dtype.itemsize):
                    sent, received = part.seen_from(stored.box), part.seen_from(request.box)
                    move = SliceTransfer(stored.offset, sent, number, received, request.dtype)
                    pairs.setdefault((source, to), []).append(move)
    mine = [
        parcel for (source, to), moves in pairs.items() for parcel in _packed(source, to, moves)
    ]
    places = {device: i for i, device in enumerate(sorted({*wanted, *_givers(index)}))}

    def turn(parcel: Parcel) -> tuple[int, int, int]:
        rounds = (places[parcel.to] - places[parcel.source]) % len(places)
        return rounds, parcel.tag, parcel.source

    return sorted(mine, key=turn)


def _givers(index: Index) -> set[int]:
    return {
        int(one.file)
        for _, entries in index.tensors.tables()
        for entry in entries.values()
        for one in entry.slices
    }


def _packed(source: int, to: int, moves: Iterable[SliceTransfer]) -> list[Parcel]:
    rows: list[list[SliceTransfer]] = [[]]
    size = 0
    for move in moves:
        if rows[-1] and size + move.nbytes > files.BLOCK:
            rows.append([])
            size = 0
        rows[-1].append(move)
        size += move.nbytes
    return [Parcel(source, to, tag, tuple(row)) for tag, row in enumerate(rows)]


class Exchange:
    """One process's end of all parcels."""

    def __init__(self, me: int, gives: Sequence[Held], missing: Sequence[Wanted]) -> None:
        self._me = me
        self._gives = gives
        self._missing = missing

    @torch.no_grad()
    def run(self, rows: Iterable[Parcel], link: Messages) -> int:
        """Send and receive all parcels. Returns the number of bytes sent."""
        under_way: deque[tuple[Parcel, Tensor, Handle]] = deque()
        sent = 0
        for parcel in rows:
            if parcel.source == parcel.to:
                self._take(parcel, self._pack(parcel))
                continue
            if len(under_way) == IN_FLIGHT:
                self._finish(*under_way.popleft())
            if parcel.source == self._me:
                data = self._pack(parcel)
                under_way.append((parcel, data, link.send(data, parcel.to, parcel.tag)))
                sent += parcel.nbytes
            else:
                data = torch.empty(parcel.nbytes, dtype=torch.uint8)
                handle = link.receive(data, parcel.source, parcel.tag)
                under_way.append((parcel, data, handle))
        while under_way:
            self._finish(*under_way.popleft())
        return sent

    def _finish(self, parcel: Parcel, data: Tensor, handle: Handle) -> None:
        handle.wait()
        if parcel.to == self._me:
            self._take(parcel, data)

    def _pack(self, parcel: Parcel) -> Tensor:
        data = torch.empty(parcel.nbytes, dtype=torch.uint8)
        for move, slot in _slots(parcel, data):
            tensor = self._gives[move.number].tensor
            assert isinstance(tensor, Tensor)
            slot.copy_(move.sent.of(tensor))
        return data

    def _take(self, parcel: Parcel, data: Tensor) -> None:
        for move, slot in _slots(parcel, data):
            move.received.of(self._missing[move.request].into).copy_(slot)


def _slots(parcel: Parcel, data: Tensor) -> Iterable[tuple[SliceTransfer, Tensor]]:
    at = 0
    for move in parcel.moves:
        size = move.sent.numel * move.dtype.itemsize
        yield move, data[at : at + size].view(move.dtype).view(move.sent.shape)
        at += move.nbytes
