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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

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
from piper.state.checkpoint.slices import (
    MODEL,
    OPTIMIZER,
    STORED,
    Location,
    Slice,
    Tables,
    all_slices,
)
from piper.state.checkpoint.tensor_files import (
    DTYPES,
    NAMES,
    Extent,
    FileFacts,
    refuse_overlaps,
    sizes,
)

INDEX = "index.json"
_FORMAT = Format("checkpoint", 2)


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
class Part:
    """One device's contribution to the state. Devices with equal copies contribute a share each."""

    slices: Sequence[Slice] = ()
    buckets: Sequence[int | None] = ()
    """For each slice, the bucket whose update changes it, and nothing else; None for buffers."""
    values: tuple[SavedValue, ...] = ()
    groups: tuple[GroupEntry, ...] = ()
    scheduler: Any = None
    kind: str = ""
    steps: int = 0
    file: str = ""
    facts: FileFacts | None = None
    """The file with its slices, once it is written; None if there are none."""


@dataclass(frozen=True, slots=True)
class Index:
    """The parsed content of ``index.json``."""

    tables: Tables
    values: tuple[SavedValue, ...]
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

    @property
    def model(self) -> Mapping[str, Sequence[Slice]]:
        """The slices of every parameter and buffer."""
        return self.tables.get(MODEL, {})

    @property
    def optimizer(self) -> Mapping[str, Mapping[str, Sequence[Slice]]]:
        """By kind of state, the slices of each parameter's."""
        kinds = ((name.removeprefix(OPTIMIZER), x) for name, x in self.tables.items())
        return {kind: x for kind, x in kinds if kind not in (MODEL, STORED)}

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
                "model": _table_to_json(self.model),
                "optimizer": {kind: _table_to_json(x) for kind, x in self.optimizer.items()},
                "values": [[v.name, v.kind, v.part, v.ways, v.value] for v in self.values],
                "stored": _table_to_json(self.tables.get(STORED, {})),
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


def _table_to_json(tensors: Mapping[str, Sequence[Slice]]) -> dict[str, Any]:
    return {
        name: {
            "dtype": NAMES[slices[0].dtype],
            "shape": list(slices[0].shape),
            "slices": [
                [list(p.box.start), list(p.box.shape), p.file, p.key, p.offset, p.crc32]
                for p in (one.location for one in slices)
            ],
        }
        for name, slices in tensors.items()
    }


def _index(data: dict[str, Any]) -> Index:
    def part(name: str, read: Callable[[Any], Any]) -> Any:
        with within(name):
            return read(data[name])

    files: dict[str, FileFacts] = part("files", _files)

    def tensors(table_name: str, item: Any) -> dict[str, list[Slice]]:
        return _named(item, lambda name, x: _tensor(table_name, name, x, files))

    optimizer = part("optimizer", lambda x: _named(x, lambda k, y: tensors(OPTIMIZER + k, y)))
    stored = part("stored", lambda x: tensors(STORED, x))
    tables = {MODEL: part("model", lambda x: tensors(MODEL, x)), STORED: stored}
    tables |= {OPTIMIZER + kind: entries for kind, entries in optimizer.items()}
    _refuse_overlaps(tables, files)
    return Index(
        tables=tables,
        values=part("values", lambda x: tuple(rows(x, lambda y: _value(y, stored)))),
        keys=part("keys", lambda x: _named(x, lambda _, y: string(y))),
        files=files,
        steps=part("steps", count),
        seed=part("seed", whole),
        strategy=part("strategy", string),
        kind=part("kind", string),
        groups=part("groups", lambda x: tuple(rows(x, _group))),
        scheduler=part("scheduler", _plain),
        data=part("data", _plain),
    )


def _named(item: Any, read: Callable[[str, Any], Any]) -> dict[str, Any]:
    if type(item) is not dict:
        raise wrong(item, "an object")
    values = {}
    for name, value in item.items():
        with within(name):
            values[name] = read(name, value)
    return values


def _listed(item: Any, length: int, what: str) -> list[Any]:
    if type(item) is not list or len(item) != length:
        raise wrong(item, what)
    return item


def _files(item: Any) -> dict[str, FileFacts]:
    files = _named(item, lambda _, x: _file(x))
    for name in files:
        if re.fullmatch(r"[\w-]+\.safetensors", name) is None:
            raise wrong(name, "the name of a file of a checkpoint")
    return files


def _file(item: Any) -> FileFacts:
    size, header, crc = _listed(item, 3, "a size, that of the header, a checksum")
    return FileFacts(count(size), whole(header, 0, size + 1), count(crc))


def _tensor(table_name: str, name: str, item: Any, files: Mapping[str, FileFacts]) -> list[Slice]:
    table(item, ("dtype", "shape", "slices"))
    if type(item["dtype"]) is not str or item["dtype"] not in DTYPES:
        raise wrong(item["dtype"], "a dtype")
    of = Slice.whole(table_name, name, sizes(item["shape"]), DTYPES[item["dtype"]])
    with within("slices"):
        slices = rows(item["slices"], lambda x: _slice(x, of, files))
        if not slices or not tile((one.box for one in slices), of.shape):
            raise MalformedError(
                f"they are not a whole tensor of shape {list(of.shape)}: they overlap or leave "
                "something out"
            )
    return slices


def _slice(item: Any, of: Slice, files: Mapping[str, FileFacts]) -> Slice:
    start, size, file, key, offset, crc = _listed(item, 6, "a slice in a file")
    box = Box(counts(start), counts(size))
    ends = [a + n for a, n in zip(box.start, box.shape, strict=False)]
    dims = len(of.shape)
    if not len(box.start) == len(box.shape) == dims or any(map(int.__gt__, ends, of.shape)):
        raise wrong(item, f"a slice of a tensor of shape {list(of.shape)}")
    if string(file) not in files:
        raise MalformedError(f"there is no file {file!r}")
    one = replace(of, box=box, at=Location(box, file, string(key), count(offset), count(crc)))
    if offset + one.nbytes > files[file].bytes:
        raise MalformedError(f"{file} is shorter than that")
    return one


def _refuse_overlaps(tables: Tables, files: Mapping[str, FileFacts]) -> None:
    """Refuse slices that share bytes with each other or with a file's header."""
    held = {file: [Extent(0, facts.header, "the header")] for file, facts in files.items()}
    for one in all_slices(tables):
        held[one.location.file].append(Extent(one.location.offset, one.nbytes, one.text))
    for file, extents in held.items():
        with within(file):
            refuse_overlaps(extents)


def _value(item: Any, stored: Mapping[str, Sequence[Slice]]) -> SavedValue:
    name, kind, part, ways, value = _listed(item, 5, "a parameter, a kind, a part, ways, a value")
    for one in stored_names(value):
        if one not in stored:
            raise MalformedError(f"{one!r} is not among the stored tensors")
    from_json(
        value,
        lambda key: torch.empty(stored[key][0].shape, dtype=stored[key][0].dtype, device="meta"),
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
