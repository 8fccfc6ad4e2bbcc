"""The state that a device contributes to a checkpoint or to other devices: slices of named tensors,
and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from piper.state.checkpoint.boxes import Box
from piper.state.checkpoint.index import Entry, GroupEntry, SavedValue, Slice, Tensors
from piper.state.checkpoint.tensor_files import TensorToWrite

MODEL, STORED = "model", "stored"


@dataclass(frozen=True, slots=True)
class Held:
    """A slice of a named tensor."""

    table: str
    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    box: Box
    tensor: Tensor | TensorToWrite

    @property
    def key(self) -> str:
        """The slice's name in a file."""
        prefix = "" if self.table == MODEL else self.table.replace(".", "/", 1) + "/"
        return prefix + self.name + ("" if self.box == Box.whole(self.shape) else self.box.text)


def whole(table: str, name: str, tensor: Tensor | TensorToWrite) -> Held:
    shape = tuple(tensor.shape)
    return Held(table, name, shape, Box.whole(shape), tensor)


@dataclass(frozen=True, slots=True)
class Holding:
    """One device's contribution to the state. Devices with equal copies contribute a share each."""

    slices: Sequence[Held] = ()
    buckets: Sequence[int | None] = ()
    """For each slice, the bucket whose update changes it, and nothing else; None for buffers."""
    values: tuple[SavedValue, ...] = ()
    groups: tuple[GroupEntry, ...] = ()
    scheduler: Any = None
    kind: str = ""
    steps: int = 0

    def tensors(self, places: Iterable[tuple[str, str, int, int]]) -> Tensors:
        """This holding as entries of an index. ``places`` has a file, a key in it, an offset and a
        checksum for each slice."""
        tables: dict[str, dict[str, Entry]] = {}
        for held, place in zip(self.slices, places, strict=True):
            entries = tables.setdefault(held.table, {})
            known = entries[held.name].slices if held.name in entries else ()
            slices = (*known, Slice(held.box, *place))
            entries[held.name] = Entry(held.tensor.dtype, held.shape, slices)
        model, stored = tables.pop(MODEL, {}), tables.pop(STORED, {})
        optimizer = {name.partition(".")[2]: entries for name, entries in tables.items()}
        return Tensors(model, optimizer, stored, self.values)
