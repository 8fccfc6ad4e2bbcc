"""Safetensors files, written and read in pieces of a few megabytes.

The safetensors library takes all tensors of a file at once, as bytes beside the tensors themselves.
Here no process holds more than two times ``BLOCK`` bytes beside its own state, on a GPU or not.
Each tensor, and the header, has a CRC-32, so that damage is found and named.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.base.reading import MalformedError, counts, open_file, wrong
from piper.state.checkpoint.boxes import Box

BLOCK = 4 * 2**20
"""Bytes that are copied, written or read at a time."""
_SMALL = 2**16
"""Bytes below which another thread does not pay."""
_OPEN = 64
"""Files that are held open at a time."""
_DIMENSIONS = 64
"""That a tensor of torch can have."""

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
"""What the format calls the types that it has."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def sizes(item: Any) -> tuple[int, ...]:
    """The shape of a tensor, as torch can have it."""
    shape = counts(item)
    if len(shape) > _DIMENSIONS or math.prod(n for n in shape if n) >= 2**63:
        raise wrong(item, "the shape of a tensor")
    return shape


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Bytes of a file, and what they hold."""

    start: int
    size: int
    what: str


def refuse_overlaps(extents: Iterable[Extent]) -> None:
    """Refuse a file of which some bytes are said to be two things."""
    placed = sorted(extent for extent in extents if extent.size)
    for one, other in itertools.pairwise(placed):
        if other.start < one.start + one.size:
            raise MalformedError(f"{one.what} and {other.what} are said to lie in the same bytes")


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor to be written."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], Tensor]
    """Gives it when its turn comes."""

    @staticmethod
    def of(key: str, tensor: Tensor) -> TensorToWrite:
        return TensorToWrite(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file must be: its length, and that of its header with the header's checksum."""

    bytes: int
    header: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Written:
    """A file as it was written, and where in it each tensor begins, with its checksum."""

    facts: FileFacts
    tensors: Mapping[str, tuple[int, int]]


def in_order(tensors: Sequence[TensorToWrite]) -> list[TensorToWrite]:
    """As they lie in a file: the widest types first, so that every one is aligned."""
    return sorted(tensors, key=lambda x: -x.dtype.itemsize)


def write_file(path: Path, tensors: Sequence[TensorToWrite]) -> Written:
    """A new safetensors file at ``path``, which is on the disk when this returns."""
    header = header_of([(x.key, x.dtype, x.shape) for x in in_order(tensors)])
    at = len(header)
    found = {}
    with path.open("xb", buffering=BLOCK) as file, ThreadPoolExecutor(1) as pool:
        file.write(header)
        for given in in_order(tensors):
            crc = 0
            for piece in pieces_in_order(given.get().detach()):
                crc = _copied(memory_of(piece.cpu().contiguous()), file, crc, pool)
            found[given.key] = (at, crc)
            at += given.nbytes
        file.flush()
        os.fsync(file.fileno())
    return Written(FileFacts(at, len(header), zlib.crc32(header)), found)


def header_of(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """The beginning of a file with these tensors, one after another."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, dtype, shape in tensors:
        if dtype not in NAMES:
            raise PiperError(f"{key} is {dtype}, which safetensors files cannot hold")
        end = at + math.prod(shape) * dtype.itemsize
        content[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def memory_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor, itself."""
    flat = x.as_strided((x.numel(),), (1,))  # one element may have any stride
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


def pieces_in_order(x: Tensor) -> Iterator[Tensor]:
    """``x`` in pieces that may be copied, one after another in the order of their elements."""
    if not x.numel():
        return
    copied = x.device.type != "cpu" or not x.is_contiguous()
    if not copied or x.nbytes <= BLOCK:
        yield x
        return
    dim = next(i for i, n in enumerate(x.shape) if n > 1)
    for part in x.chunk(min(x.shape[dim], -(-x.nbytes // BLOCK)), dim):
        yield from pieces_in_order(part)


def _copied(data: memoryview, file: BinaryIO, crc: int, pool: ThreadPoolExecutor) -> int:
    """Write ``data``, and bring the checksum up to date meanwhile. What is large goes past the
    file's buffer, which would copy it once more."""
    for at in range(0, len(data), BLOCK):
        block = data[at : at + BLOCK]
        if len(block) < _SMALL:
            file.write(block)
            crc = zlib.crc32(block, crc)
            continue
        total = pool.submit(zlib.crc32, block, crc)
        try:
            file.flush()
            while block:
                block = block[os.write(file.fileno(), block) :]
        finally:
            crc = total.result()
    return crc


def checksum(file: BinaryIO, start: int, size: int) -> int:
    """The CRC-32 of a range of a file, as far as there is one."""
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


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor in a file: a slice of a larger one."""

    file: str
    offset: int
    dtype: torch.dtype
    box: Box


class Reader:
    """Reads slices of what lies in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()
        self._buffer = bytearray()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def read(
        self, into: Tensor, stored: TensorInFile, box: Box, via: Sequence[torch.dtype] = ()
    ) -> None:
        """Copy ``box``, which lies inside what is stored, to ``into``, which has its shape. It is
        rounded to each dtype of ``via`` on the way."""
        self._read(into, stored, box.seen_from(stored.box), via)

    def _read(
        self, into: Tensor, stored: TensorInFile, box: Box, via: Sequence[torch.dtype]
    ) -> None:
        """``box`` is counted from where the stored slice begins."""
        strides = _strides(stored.box.shape)
        first = sum(a * s for a, s in zip(box.start, strides, strict=True))
        span = 1 + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True))
        size = stored.dtype.itemsize
        at = stored.offset + first * size
        same = all(dtype == stored.dtype for dtype in (into.dtype, *via))
        direct = into.device.type == "cpu" and same and into.is_contiguous()
        if direct and span == box.numel:
            self._fill(stored.file, at, memory_of(into))
        elif span * size <= BLOCK:
            buffer = self._scratch(span * size)
            self._fill(stored.file, at, buffer)
            flat = torch.frombuffer(buffer, dtype=stored.dtype, count=span)
            found = flat.as_strided(box.shape, strides)
            for dtype in via:
                found = found.to(dtype)
            into.copy_(found)
        else:
            dim = next(i for i, n in enumerate(box.shape) if n > 1)
            half = box.shape[dim] // 2
            low = box.start[dim]
            for start, stop in ((0, half), (half, box.shape[dim])):
                part = box.between(dim, low + start, low + stop)
                assert part is not None
                self._read(into.narrow(dim, start, stop - start), stored, part, via)

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
                self._close()
            self._files[name] = self._stack.enter_context(open_file(self._folder / name))
        return self._files[name]

    def _close(self) -> None:
        self._stack.close()
        self._files.clear()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
