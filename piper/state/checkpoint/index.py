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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from piper.base.codec import ArrayRecord, Count, Format, Int64, decode, encode, picked
from piper.base.reading import MalformedError, parsed, within, wrong
from piper.state.checkpoint.boxes import tile
from piper.state.checkpoint.plain_values import from_json
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
    FileFacts,
    refuse_overlaps,
    sizes,
)

INDEX = "index.json"
_FORMAT = Format("checkpoint", 2)


class SavedValue(ArrayRecord, frozen=True):
    """Optimizer state of a parameter, or of a shard of it, that does not have its shape."""

    name: str
    kind: str
    part: Count
    """Index of the parameter's shard that it belongs to, of ``ways`` shards."""
    ways: Annotated[int, msgspec.Meta(ge=1)]
    value: Any
    """As ``plain_values.to_json`` writes it."""


class GroupEntry(ArrayRecord, frozen=True):
    """The settings of an optimizer's parameter group, and the scheduler's values for it."""

    names: tuple[str, ...]
    """Its parameters, whole or in part."""
    settings: Mapping[str, Any]
    schedule: Mapping[str, Any]


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


class _Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the index holds besides slices."""

    values: tuple[SavedValue, ...]
    keys: Mapping[str, str]
    files: Mapping[str, FileFacts]
    steps: Count
    seed: Int64
    strategy: str
    """The directives, for human readers."""
    kind: str
    """The class names of the optimizers; empty without an optimizer."""
    groups: tuple[GroupEntry, ...]
    scheduler: Any
    data: Any
    """The position in the data, if it is known."""


class Index(_Facts, frozen=True, kw_only=True):
    """The parsed content of ``index.json``."""

    tables: Tables

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
        file = _File(
            model=_table_to_file(self.model),
            optimizer={kind: _table_to_file(x) for kind, x in self.optimizer.items()},
            stored=_table_to_file(self.tables.get(STORED, {})),
            **picked(self, _Facts.__struct_fields__),
        )
        content = _FORMAT.headed(encode(file))
        rest = json.dumps(content, allow_nan=False)[1:].encode()
        return _first_line(rest) + b"\n" + rest

    @staticmethod
    def from_bytes(content: bytes) -> Index:
        """Parses output of ``to_bytes``. Anything else is refused."""
        first, _, rest = content.partition(b"\n")
        data = parsed(content)
        if type(data) is dict:
            data.pop("sha256", None)
        data = _FORMAT.content(data)
        if first != _first_line(rest):
            raise MalformedError("it is damaged: its checksum differs")
        return _index(decode(_File, data))


def _first_line(rest: bytes) -> bytes:
    return f'{{"sha256": "{hashlib.sha256(rest).hexdigest()}",'.encode()


class _TensorFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[Count, ...]
    slices: tuple[Location, ...]


class _File(_Facts, frozen=True, kw_only=True):
    """index.json."""

    model: Mapping[str, _TensorFile]
    optimizer: Mapping[str, Mapping[str, _TensorFile]]
    stored: Mapping[str, _TensorFile]


def _table_to_file(tensors: Mapping[str, Sequence[Slice]]) -> dict[str, _TensorFile]:
    return {
        name: _TensorFile(
            NAMES[slices[0].dtype], slices[0].shape, tuple(one.location for one in slices)
        )
        for name, slices in tensors.items()
    }


def _index(file: _File) -> Index:
    for name, facts in file.files.items():
        if re.fullmatch(r"[\w-]+\.safetensors", name) is None or facts.header > facts.bytes:
            raise MalformedError(
                f"files: {name!r} is not the name of a file of a checkpoint, or its header is "
                "larger than the file"
            )
    parts = {MODEL: file.model} | {OPTIMIZER + kind: x for kind, x in file.optimizer.items()}
    parts[STORED] = file.stored
    tables: dict[str, dict[str, list[Slice]]] = {}
    for table, tensors in parts.items():
        with within(table):
            tables[table] = {n: _tensor(table, n, x, file.files) for n, x in tensors.items()}
    held = {name: [(0, facts.header, "the header")] for name, facts in file.files.items()}
    for one in all_slices(tables):
        held[one.location.file].append((one.location.offset, one.nbytes, one.text))
    for name, extents in held.items():
        with within(name):
            refuse_overlaps(extents)
    for group in file.groups:
        if "params" in {*from_json(group.settings), *from_json(group.schedule)}:
            raise MalformedError("groups: settings have no params")
    from_json([file.scheduler, file.data])

    def tensor_of(key: str) -> Tensor:
        one = tables[STORED][key][0]
        return torch.empty(one.shape, dtype=one.dtype, device="meta")

    for value in file.values:
        from_json(value.value, tensor_of)
    return Index(tables=tables, **picked(file, _Facts.__struct_fields__))


def _tensor(
    table: str, name: str, item: _TensorFile, files: Mapping[str, FileFacts]
) -> list[Slice]:
    with within(name):
        if item.dtype not in DTYPES:
            raise wrong(item.dtype, "a dtype")
        of = Slice.whole(table, name, sizes(item.shape), DTYPES[item.dtype])
        slices = [_slice(place, one, of, files) for place, one in enumerate(item.slices)]
        if not slices or not tile((one.box for one in slices), of.shape):
            raise MalformedError(
                f"its slices are not a whole tensor of shape {list(of.shape)}: they overlap or "
                "leave something out"
            )
        return slices


def _slice(place: int, item: Location, of: Slice, files: Mapping[str, FileFacts]) -> Slice:
    box = item.box
    ends = [a + n for a, n in zip(box.start, box.shape, strict=False)]
    dims = len(of.shape)
    if not len(box.start) == len(box.shape) == dims or any(map(int.__gt__, ends, of.shape)):
        raise MalformedError(f"slices[{place}] is not of a tensor of shape {list(of.shape)}")
    if item.file not in files:
        raise MalformedError(f"slices[{place}]: there is no file {item.file!r}")
    one = replace(of, box=box, at=item)
    if item.offset + one.nbytes > files[item.file].bytes:
        raise MalformedError(f"slices[{place}]: {item.file} is shorter than that")
    return one
