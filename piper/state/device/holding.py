"""Slices of named tensors that a device gives away, and values beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from piper.state.checkpoint.boxes import Box
from piper.state.checkpoint.index import Entry, GroupEntry, SavedValue, Slice, Tensors
from piper.state.checkpoint.tensor_files import TensorToWrite


@dataclass(frozen=True, slots=True)
class Held:
    """A slice of a named tensor."""

    table: str
    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    box: Box
    tensor: Tensor | TensorToWrite

    @property
    def key(self) -> str:
        """What a file calls it."""
        prefix = "" if self.table == MODEL else self.table.replace(".", "/", 1) + "/"
        return prefix + self.name + ("" if self.box == Box.whole(self.shape) else self.box.text)


def whole(table: str, name: str, tensor: Tensor | TensorToWrite) -> Held:
    shape = tuple(tensor.shape)
    return Held(table, name, shape, Box.whole(shape), tensor)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one device gives of the state: of equal copies, each device a share."""

    slices: Sequence[Held] = ()
    buckets: Sequence[int | None] = ()
    """For each slice the bucket whose update alone changes it; None for buffers."""
    values: tuple[SavedValue, ...] = ()
    groups: tuple[GroupEntry, ...] = ()
    scheduler: Any = None
    kind: str = ""
    steps: int = 0

    def tensors(self, places: Iterable[tuple[str, str, int, int]]) -> Tensors:
        """The same as entries of an index, given where each slice lies: a file, its key there, an
        offset and a checksum."""
        tables: dict[str, dict[str, Entry]] = {}
        for held, place in zip(self.slices, places, strict=True):
            entries = tables.setdefault(held.table, {})
            known = entries[held.name].slices if held.name in entries else ()
            slices = (*known, Slice(held.box, *place))
            entries[held.name] = Entry(held.tensor.dtype, held.shape, slices)
        model, stored = tables.pop(MODEL, {}), tables.pop(STORED, {})
        optimizer = {name.partition(".")[2]: entries for name, entries in tables.items()}
        return Tensors(model, optimizer, stored, self.values)


MODEL, STORED = "model", "stored"
