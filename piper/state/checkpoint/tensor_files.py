"""Writes and reads safetensors files in pieces of a few megabytes.

The safetensors library copies all tensors of a file to bytes at once. Here a process never holds
more than two times ``BLOCK`` bytes besides its own state, on CPU or GPU. Each tensor and the header
have a CRC-32, so damage is detected and located.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from msgspec import structs
from torch import Tensor

from piper.base.codec import ArrayRecord, Count
from piper.base.errors import PiperError
from piper.base.reading import MalformedError, open_file, wrong
from piper.state.checkpoint.boxes import Box, row_major
from piper.state.checkpoint.slices import Location, Slice, covered

BLOCK = 4 * 2**20
"""Bytes copied, written or read at a time."""
_SMALL = 2**16
"""Bytes below which a second thread is not worth it."""
_OPEN = 64
"""Files held open at a time."""
_DIMENSIONS = 64
"""The most dimensions of a torch tensor."""

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names for the dtypes it supports."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape, checked against torch's limits."""
    if len(shape) > _DIMENSIONS or math.prod(n for n in shape if n) >= 2**63:
        raise wrong(shape, "the shape of a tensor")
    return shape


def refuse_overlaps(extents: Iterable[tuple[int, int, str]]) -> None:
    """Refuse a file whose byte ranges overlap: each has a start, a size, and a name."""
    placed = sorted(extent for extent in extents if extent[1])
    for (start, size, one), (other_start, _, other) in itertools.pairwise(placed):
        if other_start < start + size:
            raise MalformedError(f"{one} and {other} are said to lie in the same bytes")


class FileFacts(ArrayRecord, frozen=True):
    """Expected facts of a file, in bytes: its size, its header's size and the header's CRC-32."""

    bytes: Count
    header: Count
    crc32: Count


def laid_out(file: str, slices: Iterable[Slice]) -> tuple[bytes, list[tuple[Slice, Slice]]]:
    """The header of a file, and its slices in order, each with itself in the file: widest dtypes
    first, so that every tensor is aligned."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(slices, key=lambda one: -one.dtype.itemsize)
    starts = list(itertools.accumulate((one.nbytes for one in ordered), initial=0))
    for one, ends in zip(ordered, itertools.pairwise(starts), strict=True):
        if one.dtype not in NAMES:
            raise PiperError(f"{one.key} is {one.dtype}, which safetensors files cannot hold")
        shape = list(one.box.shape)
        content[one.key] = {"dtype": NAMES[one.dtype], "shape": shape, "data_offsets": ends}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [
        (one, one.stored(file, len(header) + start))
        for one, start in zip(ordered, starts, strict=False)
    ]


def write_file(path: Path, slices: Iterable[Slice]) -> tuple[FileFacts, list[Slice]]:
    """Writes a new safetensors file at ``path`` and syncs it to disk; one that an earlier attempt
    left there is removed. Returns its facts, and its slices in it."""
    path.unlink(missing_ok=True)
    written = []
    with Writer.opened(path.parent) as out:
        facts, placed = out.create(path.name, slices)
        for given, target in placed:
            crc = out.write(given, target)
            at = structs.replace(target.location, crc32=crc)
            written.append(replace(target, at=at))
    return facts, written


def memory_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor, not copied."""
    flat = x.as_strided((x.numel(),), (1,))  # a dimension of size 1 may have any stride
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


def pieces_in_order(x: Tensor) -> Iterator[Tensor]:
    """``x`` in pieces that are small enough to copy, in row-major order. A contiguous CPU tensor is
    one piece: it needs no copy."""
    if x.numel():
        copied = x.device.type != "cpu" or not x.is_contiguous()
        most = BLOCK // x.dtype.itemsize if copied else x.numel()
        yield from (box.of(x) for box in Box.whole(x.shape).cut(most))


class Writer:
    """Writes slices of tensors to their places in the files of a folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._pool = stack.enter_context(ThreadPoolExecutor(1))
        self._files: dict[str, int] = {}

    @staticmethod
    @contextmanager
    def opened(folder: Path) -> Iterator[Writer]:
        """A writer that syncs its files to disk at the end, and closes them."""
        with ExitStack() as stack:
            writer = Writer(folder, stack)
            yield writer
            for file in writer._files.values():
                os.fsync(file)

    def create(
        self, name: str, slices: Iterable[Slice]
    ) -> tuple[FileFacts, list[tuple[Slice, Slice]]]:
        """A new file with room for ``slices``: its facts, and ``laid_out``."""
        header, placed = laid_out(name, slices)
        size = len(header) + sum(one.nbytes for one, _ in placed)
        file = self._open(name, os.O_CREAT | os.O_EXCL)
        crc = self._write(file, memoryview(header), 0, 0)
        os.ftruncate(file, size)
        return FileFacts(size, len(header), crc), placed

    def write(self, source: Slice, target: Slice) -> int:
        """Write ``source`` to its place in ``target``, which contains it. Returns the CRC-32 of the
        bytes written."""
        location = target.location
        strides = row_major(location.box.shape)
        first = source.box.seen_from(location.box).offset(strides)
        at = location.offset + first * target.dtype.itemsize
        file = self._open(location.file)
        return self._put(file, target.dtype, at, strides, source.tensor.detach(), 0)

    def _put(
        self, file: int, dtype: torch.dtype, at: int, strides: Sequence[int], x: Tensor, crc: int
    ) -> int:
        if not x.dim() or strides[0] == math.prod(x.shape[1:]):  # contiguous in the file
            for piece in pieces_in_order(x):
                data = memory_of(piece.to(dtype).cpu().contiguous())
                crc = self._write(file, data, at, crc)
                at += len(data)
            return crc
        for i, row in enumerate(x):
            crc = self._put(
                file, dtype, at + i * strides[0] * dtype.itemsize, strides[1:], row, crc
            )
        return crc

    def _write(self, file: int, data: memoryview, at: int, crc: int) -> int:
        """Write ``data`` at ``at``, and update the checksum at the same time."""
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            total = self._pool.submit(zlib.crc32, block, crc) if len(block) >= _SMALL else None
            crc = zlib.crc32(block, crc) if total is None else crc
            while block:
                n = os.pwrite(file, block, at)
                block, at = block[n:], at + n
            crc = crc if total is None else total.result()
        return crc

    def _open(self, name: str, flags: int = 0) -> int:
        if name not in self._files:
            self._files[name] = os.open(self._folder / name, os.O_WRONLY | flags, 0o666)
            self._stack.callback(os.close, self._files[name])
        return self._files[name]


def checksum(file: BinaryIO, start: int, size: int) -> int:
    """The CRC-32 of a range of a file, up to the end of the file."""
    buffer = memoryview(bytearray(min(BLOCK, size)))
    file.seek(start)
    crc = 0
    while size:
        n = _filled(file, buffer[: min(BLOCK, size)])
        if not n:
            break
        crc = zlib.crc32(buffer[:n], crc)
        size -= n
    return crc


def _filled(file: BinaryIO, buffer: memoryview) -> int:
    at = 0
    while at < len(buffer):
        n: int = file.readinto(buffer[at:])  # type: ignore[attr-defined]
        if not n:
            break
        at += n
    return at


class Reader(ExitStack):
    """Reads slices of tensors from the files of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._buffer = bytearray()

    def fill(self, want: Slice, slices: Iterable[Slice], via: Sequence[torch.dtype] = ()) -> None:
        """Copy what ``slices`` of the same tensor have to the memory of ``want``."""
        for source, target in covered(want, slices):
            self.copy(source, target.tensor, via)

    def copy(self, source: Slice, into: Tensor, via: Sequence[torch.dtype] = ()) -> None:
        """Copy ``source``, which is in memory or in a file, to ``into``, rounded to each dtype of
        ``via`` on the way."""
        if isinstance(source.at, Location):
            self._read(source, into, via)
        else:
            self._convert(source.tensor, into, via)

    def _read(self, source: Slice, into: Tensor, via: Sequence[torch.dtype]) -> None:
        place, box, size = source.location, source.box, source.dtype.itemsize
        strides = row_major(place.box.shape)
        span = 1 + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True))
        at = place.offset + box.seen_from(place.box).offset(strides) * size
        same = all(one == source.dtype for one in (into.dtype, *via))
        direct = into.device.type == "cpu" and same and into.is_contiguous()
        if direct and span == box.numel:
            self._fill(place.file, at, memory_of(into))
        elif span * size <= BLOCK:
            buffer = self._scratch(span * size)
            self._fill(place.file, at, buffer)
            flat = torch.frombuffer(buffer, dtype=source.dtype, count=span)
            self._convert(flat.as_strided(box.shape, strides), into, via)
        else:
            dim = next(i for i, n in enumerate(box.shape) if n > 1)
            low, n = box.start[dim], box.shape[dim]
            for start, stop in ((low, low + n // 2), (low + n // 2, low + n)):
                part = box.between(dim, start, stop)
                assert part is not None
                self._read(source.part(part), part.seen_from(box).of(into), via)

    def _convert(self, values: Tensor, into: Tensor, via: Sequence[torch.dtype]) -> None:
        for one, after in itertools.pairwise((*via, into.dtype)):
            if one != after:  # copy_ converts to the last one
                values = values.to(one)
        into.copy_(values)

    def _scratch(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = bytearray(min(BLOCK, 2 * size))
        return memoryview(self._buffer)[:size]

    def _fill(self, name: str, at: int, into: memoryview) -> None:
        file = self._open(name)
        file.seek(at)
        if (n := _filled(file, into)) < len(into):
            raise PiperError(f"{self._folder / name} ends after {at + n} bytes")

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            if len(self._files) == _OPEN:
                self.close()
                self._files.clear()
            self._files[name] = self.enter_context(open_file(self._folder / name))
        return self._files[name]
