"""The index of a checkpoint: ``index.json``, which says what lies where.

    model       by name, each parameter and buffer: dtype, shape, and the slices that it lies in
    optimizer   by kind of state (exp_avg), by parameter, the same
    values      what an optimizer keeps of a parameter that has not its shape, such as a counter
    stored      the tensors of such values, if they are large
    keys        the keys of the model's state dict, and which tensor each stands for
    steps, seed, strategy, scheduler, groups, kind of optimizer, data
    files       how long each file and its header are, and the header's CRC-32; a slice has its own

The first line has the SHA-256 of all others. Nothing that is read is trusted: whatever is not what
it must be raises a ``MalformedError`` that says where.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from piper.base.codec import Format
from piper.base.reading import (
    MalformedError,
    count,
    counts,
    parsed,
    rows,
    string,
    table,
    whole,
    within,
    wrong,
)
from piper.state.checkpoint.boxes import Box, tile
from piper.state.checkpoint.plain_values import from_json, stored_names
from piper.state.checkpoint.tensor_files import (
    DTYPES,
    NAMES,
    Extent,
    FileFacts,
    Reader,
    TensorInFile,
    refuse_overlaps,
    sizes,
)

INDEX = "index.json"
_FORMAT = Format("checkpoint", 2)


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangular slice of a tensor, and where it lies."""

    box: Box
    file: str
    """In memory, the number of a device."""
    key: str
    """What the file calls it."""
    offset: int
    """Where in the file it begins, in bytes; in memory, which of the device's slices it is."""
    crc32: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole tensor and the slices that it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    def within(self, box: Box) -> list[tuple[Box, TensorInFile]]:
        """The parts of ``box``, and what each one lies in."""
        found = []
        for one in self.slices:
            if (common := box.common(one.box)) is not None:
                found.append((common, TensorInFile(one.file, one.offset, self.dtype, one.box)))
        return found

    def read(self, reader: Reader, box: Box, into: Tensor, via: Sequence[torch.dtype] = ()) -> None:
        """Copy ``box`` to ``into``, rounded to each dtype of ``via`` on the way."""
        for common, stored in self.within(box):
            reader.read(common.seen_from(box).of(into), stored, common, via)


Entries = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class SavedValue:
    """What an optimizer keeps of a parameter, or of a shard of it, that has not its shape."""

    name: str
    kind: str
    part: int
    """Which shard of the parameter it was kept for, of how many."""
    ways: int
    value: Any
    """As ``values.to_json`` writes it."""


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """The settings of a group of the optimizer, and what a scheduler keeps for it."""

    names: tuple[str, ...]
    settings: Any
    schedule: Any


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a checkpoint, or one device's part of it, holds."""

    model: Entries = field(default_factory=dict)
    optimizer: Mapping[str, Entries] = field(default_factory=dict)
    stored: Entries = field(default_factory=dict)
    values: tuple[SavedValue, ...] = ()

    @staticmethod
    def joined(parts: Iterable[Tensors]) -> Tensors:
        """All that the devices have written."""
        model: dict[str, Entry] = {}
        optimizer: dict[str, dict[str, Entry]] = {}
        stored: dict[str, Entry] = {}
        values: list[SavedValue] = []
        for part in parts:
            _join(model, part.model)
            for kind, entries in part.optimizer.items():
                _join(optimizer.setdefault(kind, {}), entries)
            stored.update(part.stored)
            values += part.values
        return Tensors(model, optimizer, stored, tuple(values))

    def tables(self) -> Iterable[tuple[str, Entries]]:
        """All entries, and what to call them."""
        yield "model", self.model
        for kind, entries in self.optimizer.items():
            yield f"optimizer.{kind}", entries
        yield "stored", self.stored


def _join(all_of: dict[str, Entry], some: Entries) -> None:
    for name, entry in some.items():
        known = all_of.get(name)
        if known is not None:
            entry = Entry(entry.dtype, entry.shape, (*known.slices, *entry.slices))
        all_of[name] = entry


@dataclass(frozen=True, slots=True)
class Index:
    """Everything that a checkpoint says of itself."""

    tensors: Tensors
    keys: Mapping[str, str]
    files: Mapping[str, FileFacts]
    steps: int
    seed: int
    strategy: str
    """The directives, to be read by people."""
    kind: str
    """The name of the optimizer's class, or nothing."""
    groups: tuple[GroupEntry, ...]
    scheduler: Any
    data: Any
    """Where in the data training is, if it was told."""

    def first(self, name: str) -> str:
        """The name here of what the model has under ``name``: tied tensors have several."""
        return self.keys.get(name, name)

    def entry(self, name: str) -> Entry:
        """The parameter or buffer that the model has under ``name``."""
        return self.tensors.model[self.first(name)]

    def in_files(self, named: Callable[[str], str]) -> Index:
        """The same where each file has the name that ``named`` gives it."""

        def moved(entries: Entries) -> dict[str, Entry]:
            return {
                name: replace(one, slices=tuple(replace(s, file=named(s.file)) for s in one.slices))
                for name, one in entries.items()
            }

        tensors = replace(
            self.tensors,
            model=moved(self.tensors.model),
            optimizer={kind: moved(one) for kind, one in self.tensors.optimizer.items()},
            stored=moved(self.tensors.stored),
        )
        files = {named(name): facts for name, facts in self.files.items()}
        return replace(self, tensors=tensors, files=files)

    def to_bytes(self) -> bytes:
        """The file that holds it."""
        content = _FORMAT.headed(
            {
                "steps": self.steps,
                "seed": self.seed,
                "kind": self.kind,
                "strategy": self.strategy,
                "scheduler": self.scheduler,
                "groups": [[list(g.names), g.settings, g.schedule] for g in self.groups],
                "data": self.data,
                "keys": dict(self.keys),
                "model": _entries_to_json(self.tensors.model),
                "optimizer": {k: _entries_to_json(e) for k, e in self.tensors.optimizer.items()},
                "values": [[v.name, v.kind, v.part, v.ways, v.value] for v in self.tensors.values],
                "stored": _entries_to_json(self.tensors.stored),
                "files": {n: [f.bytes, f.header, f.crc32] for n, f in self.files.items()},
            }
        )
        rest = json.dumps(content, allow_nan=False)[1:].encode()
        return _first_line(rest) + b"\n" + rest

    @staticmethod
    def from_bytes(content: bytes) -> Index:
        """What ``to_bytes`` wrote; anything else is refused."""
        return _index(_checked(content))


def files_of(content: bytes) -> dict[str, FileFacts]:
    """Of an index, which files there are."""
    with within("files"):
        return _files(_checked(content)["files"])


def _checked(content: bytes) -> dict[str, Any]:
    first, _, rest = content.partition(b"\n")
    data = parsed(content)
    if type(data) is dict:
        data.pop("sha256", None)
    data = _FORMAT.content(data)
    if first != _first_line(rest):
        raise MalformedError("it is damaged: its checksum differs")
    return table(data, _FIELDS)


def _first_line(rest: bytes) -> bytes:
    return f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",'.encode()


_FIELDS = (
    "steps", "seed", "kind", "strategy", "scheduler", "groups", "data", "keys", "model",
    "optimizer", "values", "stored", "files",
)  # fmt: skip


def _entries_to_json(entries: Entries) -> dict[str, Any]:
    return {
        name: {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "slices": [
                [list(s.box.start), list(s.box.shape), s.file, s.key, s.offset, s.crc32]
                for s in entry.slices
            ],
        }
        for name, entry in entries.items()
    }


def _index(data: dict[str, Any]) -> Index:
    def part(name: str, read: Callable[[Any], Any]) -> Any:
        with within(name):
            return read(data[name])

    files: dict[str, FileFacts] = part("files", _files)

    def entries(item: Any) -> dict[str, Entry]:
        return _named(item, lambda x: _entry(x, files))

    stored = part("stored", entries)
    tensors = Tensors(
        model=part("model", entries),
        optimizer=part("optimizer", lambda x: _named(x, entries)),
        stored=stored,
        values=part("values", lambda x: tuple(rows(x, lambda y: _value(y, stored)))),
    )
    _refuse_overlaps(tensors, files)
    return Index(
        tensors=tensors,
        keys=part("keys", lambda x: _named(x, string)),
        files=files,
        steps=part("steps", count),
        seed=part("seed", whole),
        strategy=part("strategy", string),
        kind=part("kind", string),
        groups=part("groups", lambda x: tuple(rows(x, _group))),
        scheduler=part("scheduler", _plain),
        data=part("data", _plain),
    )


def _named(item: Any, read: Callable[[Any], Any]) -> dict[str, Any]:
    if type(item) is not dict:
        raise wrong(item, "an object")
    found = {}
    for name, one in item.items():
        with within(name):
            found[name] = read(one)
    return found


def _listed(item: Any, length: int, what: str) -> list[Any]:
    if type(item) is not list or len(item) != length:
        raise wrong(item, what)
    return item


def _files(item: Any) -> dict[str, FileFacts]:
    files = _named(item, _file)
    for name in files:
        if re.fullmatch(r"[\w-]+\.safetensors", name) is None:
            raise wrong(name, "the name of a file of a checkpoint")
    return files


def _file(item: Any) -> FileFacts:
    size, header, crc = _listed(item, 3, "a size, that of the header, a checksum")
    return FileFacts(count(size), whole(header, 0, size + 1), count(crc))


def _entry(item: Any, files: Mapping[str, FileFacts]) -> Entry:
    table(item, ("dtype", "shape", "slices"))
    if type(item["dtype"]) is not str or item["dtype"] not in DTYPES:
        raise wrong(item["dtype"], "a dtype")
    dtype, shape = DTYPES[item["dtype"]], sizes(item["shape"])
    with within("slices"):
        slices = tuple(rows(item["slices"], lambda x: _slice(x, dtype, shape, files)))
        if not tile((one.box for one in slices), shape):
            raise MalformedError(
                f"they are not a whole tensor of shape {list(shape)}: they overlap or leave "
                "something out"
            )
    return Entry(dtype, shape, slices)


def _slice(
    item: Any, dtype: torch.dtype, shape: tuple[int, ...], files: Mapping[str, FileFacts]
) -> Slice:
    start, size, file, key, offset, crc = _listed(item, 6, "a slice in a file")
    box = Box(counts(start), counts(size))
    ends = [a + n for a, n in zip(box.start, box.shape, strict=False)]
    if not len(box.start) == len(box.shape) == len(shape) or any(map(int.__gt__, ends, shape)):
        raise wrong(item, f"a slice of a tensor of shape {list(shape)}")
    if string(file) not in files:
        raise MalformedError(f"there is no file {file!r}")
    if count(offset) + box.numel * dtype.itemsize > files[file].bytes:
        raise MalformedError(f"{file} is shorter than that")
    return Slice(box, file, string(key), offset, count(crc))


def _refuse_overlaps(tensors: Tensors, files: Mapping[str, FileFacts]) -> None:
    """What one slice is read from is no other's, nor the header's."""
    held: dict[str, list[Extent]] = {
        file: [Extent(0, facts.header, "the header")] for file, facts in files.items()
    }
    for table_name, entries in tensors.tables():
        for name, entry in entries.items():
            for one in entry.slices:
                size = one.box.numel * entry.dtype.itemsize
                extent = Extent(one.offset, size, f"{table_name} {name}{one.box.text}")
                held[one.file].append(extent)
    for file, extents in held.items():
        with within(file):
            refuse_overlaps(extents)


def _value(item: Any, stored: Entries) -> SavedValue:
    name, kind, part, ways, value = _listed(item, 5, "a parameter, a kind, a part, ways, a value")
    for one in stored_names(value):
        if one not in stored:
            raise MalformedError(f"{one!r} is not among what is stored")
    from_json(
        value, lambda key: torch.empty(stored[key].shape, dtype=stored[key].dtype, device="meta")
    )
    return SavedValue(string(name), string(kind), count(part), whole(ways, 1), value)


def _plain(item: Any) -> Any:
    from_json(item)
    return item


def _group(item: Any) -> GroupEntry:
    names, settings, schedule = _listed(item, 3, "names, settings and a schedule")
    for one in (settings, schedule):
        if type(one) is not dict:
            raise wrong(one, "an object")
        if "params" in _plain(one):
            raise MalformedError("settings have no params")
    return GroupEntry(tuple(rows(names, string)), settings, schedule)
