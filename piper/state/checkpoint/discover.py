"""Finds the tensors in a folder of safetensors files: their names and locations.

The folder's format is the first of these that exists:

    index.json                     a checkpoint of ``trainer.save``: slices of the model's tensors
    model.safetensors.index.json   maps tensors to files, as in the transformers library
    model.safetensors              all tensors in one file
    *.safetensors                  any other names, as in torch's distributed checkpoints: a header
                                   may say that its tensors are slices of larger ones

Only headers and indices are read here. They are untrusted: malformed ones are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from piper.base.codec import Count, decode
from piper.base.errors import PiperError
from piper.base.reading import MalformedError, file_bytes, open_file, parsed, within, wrong
from piper.state.checkpoint.boxes import Box, tile
from piper.state.checkpoint.hf_export import WEIGHTS, WEIGHTS_INDEX
from piper.state.checkpoint.index import INDEX, Index
from piper.state.checkpoint.slices import MODEL, Location, Slice
from piper.state.checkpoint.tensor_files import DTYPES, refuse_overlaps, sizes
from piper.state.checkpoint.verify_files import size_of

_SUFFIX = ".safetensors"
_SHARDING = "DCP_SHARDING_INFO"
"""Header field with the offsets of a file's slices in the whole tensors."""
_LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


class _Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    saved_offsets: tuple[Count, ...]


def stored_tensors(path: Path) -> tuple[Path, dict[str, Sequence[Slice]]]:
    """The folder with the files, and every tensor in them. ``path`` is a folder or one file."""
    if path.is_file():
        return path.parent, _of_files(path.parent, [path.name])
    if not path.is_dir():
        raise PiperError(f"there is no folder of weights at {path}")
    if (path / INDEX).exists():
        return path, _of_checkpoint(path)
    if (path / WEIGHTS_INDEX).exists():
        return path, _of_index(path)
    if (path / WEIGHTS).exists():
        return path, _of_files(path, [WEIGHTS])
    names = sorted(file.name for file in path.iterdir() if file.name.endswith(_SUFFIX))
    if not names:
        raise PiperError(
            f"{path} has no safetensors files: weights in another format, such as "
            "pytorch_model.bin, must be saved as safetensors first"
        )
    return path, _of_files(path, names)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PiperError(f"{path} cannot be read: {error}") from error
    except MalformedError as error:
        raise PiperError(f"{path} cannot be used: {error}") from None


def _of_checkpoint(folder: Path) -> dict[str, Sequence[Slice]]:
    with _reading(folder / INDEX):
        index = Index.from_bytes(file_bytes(folder / INDEX))
        for name, facts in index.files.items():
            with within(name):
                if (size := size_of(folder / name)) != facts.bytes:
                    raise MalformedError(f"it has {size} bytes, not {facts.bytes}")
        for key, name in index.keys.items():
            if name not in index.model:
                raise MalformedError(f"{key} is not among the tensors")
    return {key: index.model[name] for key, name in index.keys.items()}


def _of_index(folder: Path) -> dict[str, Sequence[Slice]]:
    with _reading(folder / WEIGHTS_INDEX):
        data = parsed(file_bytes(folder / WEIGHTS_INDEX))
        if type(data) is not dict or type(data.get("weight_map")) is not dict:
            raise MalformedError("it has no weight_map")
        files: dict[str, str] = decode(dict[str, str], data["weight_map"])
        for key, name in files.items():
            with within(key):
                if Path(name).name != name or not name.endswith(_SUFFIX):
                    raise wrong(name, "the name of a safetensors file of this folder")
    there = _of_files(folder, sorted(set(files.values())))
    for key, name in files.items():
        if key not in there or all(one.location.file != name for one in there[key]):
            raise PiperError(f"{folder / WEIGHTS_INDEX} says that {key} is in {name}: it is not")
    return {key: there[key] for key in files}


def _of_files(folder: Path, names: Iterable[str]) -> dict[str, Sequence[Slice]]:
    tensors: dict[str, list[Slice]] = {}
    for name in names:
        with _reading(folder / name):
            for one in _of_file(folder, name):
                known = tensors.setdefault(one.name, [])
                if known and (one.dtype, len(one.shape)) != (known[0].dtype, len(known[0].shape)):
                    raise MalformedError(
                        f"{one.name} is of another kind in {known[0].location.file}"
                    )
                known.append(one)
    for key, slices in tensors.items():
        shape = tuple(map(max, zip(*(one.shape for one in slices), strict=True)))
        if not tile((one.box for one in slices), shape):
            files = ", ".join(dict.fromkeys(one.location.file for one in slices))
            raise PiperError(
                f"the slices of {key} in {files} of {folder} are not a whole tensor: they overlap "
                "or leave something out"
            )
        slices[:] = [replace(one, shape=shape) for one in slices]
    return {**tensors}


def _of_file(folder: Path, name: str) -> Iterator[Slice]:
    """The slices in one file. Each shape is a lower bound of the whole tensor's: it ends where
    this file's slice ends."""
    header, begin, end = _header(folder / name)
    starts = _starts(header.pop("__metadata__", None))
    extents = []
    for key, item in header.items():
        with within(key):
            entry: _Entry = decode(_Entry, item)
            if entry.dtype not in DTYPES:
                raise wrong(entry.dtype, "a dtype")
            dtype, size = DTYPES[entry.dtype], sizes(entry.shape)
            first, last = entry.data_offsets
            start = starts.get(key, (0,) * len(size))
            if len(start) != len(size):
                raise MalformedError("its offsets have another number of dimensions than its shape")
            box = Box(start, size)
            ends = tuple(a + n for a, n in zip(start, size, strict=True))
            place = Location(start, size, name, key, begin + first, 0)
            one = Slice(MODEL, key, ends, dtype, box, place)
            if last - first != one.nbytes or begin + last > end:
                raise MalformedError("its data_offsets do not fit its size or the file")
            extents.append((first, last - first, key))
            yield one
    refuse_overlaps(extents)


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """A file's header, the offset of its end, and the size of the file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _LARGEST_HEADER):
            raise MalformedError("it is no safetensors file, or cut off")
        header = parsed(file.read(length))
    if type(header) is not dict:
        raise MalformedError("it is no safetensors file")
    return header, 8 + length, size


def _starts(metadata: Any) -> dict[str, tuple[int, ...]]:
    """For each tensor name, the offset of its slice in the whole tensor; empty without slices."""
    if type(metadata) is not dict or _SHARDING not in metadata:
        return {}
    with within(_SHARDING):
        offsets = parsed(decode(str, metadata[_SHARDING]))
        starts: dict[str, _Start] = decode(dict[str, _Start], offsets)
        return {key: start.saved_offsets for key, start in starts.items()}
