"""The index of a checkpoint, ``index.json``: where every slice of every tensor is stored.

    model       by name, each parameter and buffer: dtype, shape and slices
    optimizer   by kind of state (exp_avg), then by parameter: the same
    values      optimizer state without the parameter's shape, such as a step counter
    stored      large tensors inside such values
    keys        the keys of the model's state dict, each with its tensor's first name
    steps, seed, strategy, scheduler, groups, kind of optimizer, data
    files       size of each file and of its header, and the header's CRC-32; slices have their own

The first line holds the SHA-256 of all other lines. Content that is read is untrusted: malformed
content raises a ``MalformedError`` that says where.
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
    """A rectangular slice of a tensor and its location."""

    box: Box
    file: str
    """The file's name. For state in memory: the number of the device."""
    key: str
    """The slice's name in the file."""
    offset: int
    """Bytes from the start of the file. For state in memory: the index among the device's
    slices."""
    crc32: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A whole tensor and its slices."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    def within(self, box: Box) -> list[tuple[Box, TensorInFile]]:
        """The parts of ``box``, each with the stored slice that contains it."""
        parts = []
        for part in self.slices:
            if (common := box.common(part.box)) is not None:
                parts.append((common, TensorInFile(part.file, part.offset, self.dtype, part.box)))
        return parts

    def read(self, reader: Reader, box: Box, into: Tensor, via: Sequence[torch.dtype] = ()) -> None:
        """Copy ``box`` to ``into``, rounded to each dtype of ``via`` on the way."""
        for common, stored in self.within(box):
            reader.read(common.seen_from(box).of(into), stored, common, via)


Entries = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class SavedValue:
    """Optimizer state of a parameter, or of a shard of it, that does not have its shape."""

    name: str
    kind: str
    part: int
    """Index of the parameter's shard that it belongs to, of ``ways`` shards."""
    ways: int
    value: Any
    """As ``plain_values.to_json`` writes it."""


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """The settings of an optimizer's parameter group, and the scheduler's values for it."""

    names: tuple[str, ...]
    settings: Any
    schedule: Any


@dataclass(frozen=True, slots=True)
class Tensors:
    """The contents of a checkpoint, or of one device's part of it."""

    model: Entries = field(default_factory=dict)
    optimizer: Mapping[str, Entries] = field(default_factory=dict)
    stored: Entries = field(default_factory=dict)
    values: tuple[SavedValue, ...] = ()

    @staticmethod
    def joined(parts: Iterable[Tensors]) -> Tensors:
        """The parts of all devices, joined."""
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
        """All entries, each table with its name."""
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
    """The parsed content of ``index.json``."""

    tensors: Tensors
    keys: Mapping[str, str]
    files: Mapping[str, FileFacts]
    steps: int
    seed: int
    strategy: str
    """The directives, for human readers."""
    kind: str
    """The class names of the optimizers; empty without an optimizer."""
    groups: tuple[GroupEntry, ...]
    scheduler: Any
    data: Any
    """The position in the data, if it is known."""

    def first(self, name: str) -> str:
        """This index's name for the model's tensor ``name``. Tied tensors have several names."""
        return self.keys.get(name, name)

    def entry(self, name: str) -> Entry:
        """The entry of the model's parameter or buffer ``name``."""
        return self.tensors.model[self.first(name)]

    def in_files(self, named: Callable[[str], str]) -> Index:
        """This index with each file renamed by ``named``."""

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
        """The content of ``index.json``."""
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
        """Parses output of ``to_bytes``. Anything else is refused."""
        return _index(_checked(content))


def files_of(content: bytes) -> dict[str, FileFacts]:
    """The files that an index lists, without parsing the rest of it."""
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
    values = {}
    for name, value in item.items():
        with within(name):
            values[name] = read(value)
    return values


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
    """Refuse slices that share bytes with each other or with a file's header."""
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
            raise MalformedError(f"{one!r} is not among the stored tensors")
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
