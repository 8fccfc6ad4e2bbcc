"""Export for ``from_pretrained`` of the transformers library: whole tensors under the model's own
names, in one or several safetensors files.

``lay_out`` first creates the files at their full length. Then each worker writes its own slices in
place. No worker gathers a whole tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from piper.base.atomic import FileKind
from piper.state.checkpoint.boxes import Box
from piper.state.checkpoint.tensor_files import header_of, memory_of, pieces_in_order

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PRETRAINED = FileKind(
    "model",
    re.compile(r"(?P<stem>model)(-(?P<number>\d{1,4}))?-\d{5}-of-\d{5}\.safetensors"),
    (WEIGHTS, WEIGHTS_INDEX),
)
"""Markers: the index names several files; a single file is its own marker."""


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """The place of a whole tensor in the exported files."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str = ""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def lay_out(
    folder: Path, tensors: Mapping[str, WholeTensor], file_bytes: int, named: Callable[[str], str]
) -> dict[str, WholeTensor]:
    """Create files for ``tensors``, none much longer than ``file_bytes``, and their index if there
    are several. The index uses the file names that ``named`` returns. Returns the place of each
    tensor."""
    runs: list[list[str]] = [[]]
    size = 0
    for name, one in tensors.items():
        if runs[-1] and size + one.nbytes > file_bytes:
            runs.append([])
            size = 0
        runs[-1].append(name)
        size += one.nbytes
    placed: dict[str, WholeTensor] = {}
    for place, names in enumerate(runs):
        file = WEIGHTS
        if len(runs) > 1:
            file = f"model-{place + 1:05}-of-{len(runs):05}.safetensors"
        placed |= _make(folder, file, {name: tensors[name] for name in names})
    if len(runs) > 1:
        index = {
            "metadata": {"total_size": sum(one.nbytes for one in tensors.values())},
            "weight_map": {one.key: named(one.file) for one in placed.values()},
        }
        (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2))
    return placed


def _make(folder: Path, file: str, tensors: Mapping[str, WholeTensor]) -> dict[str, WholeTensor]:
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header = header_of([(x.key, x.dtype, x.shape) for x in (tensors[name] for name in names)])
    at = len(header)
    placed = {}
    for name in names:
        tensor = tensors[name]
        placed[name] = WholeTensor(tensor.key, tensor.dtype, tensor.shape, file, at)
        at += tensor.nbytes
    with (folder / file).open("xb") as content:
        content.write(header)
        content.truncate(at)
    return placed


class SliceWriter:
    """Writes slices of tensors to their places in the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    @staticmethod
    @contextmanager
    def opened(folder: Path) -> Iterator[SliceWriter]:
        """A writer that syncs its files to disk at the end, and closes them."""
        writer = SliceWriter(folder)
        try:
            yield writer
            for descriptor in writer._files.values():
                os.fsync(descriptor)
        finally:
            for descriptor in writer._files.values():
                os.close(descriptor)

    def write(self, target: WholeTensor, box: Box, tensor: Tensor) -> None:
        """Write ``tensor`` at ``box`` of ``target``."""
        if target.file not in self._files:
            self._files[target.file] = os.open(self._folder / target.file, os.O_WRONLY)
        strides = [math.prod(target.shape[i + 1 :]) for i in range(len(target.shape))]
        first = sum(a * s for a, s in zip(box.start, strides, strict=True))
        self._put(target, target.offset + first * target.dtype.itemsize, strides, tensor.detach())

    def _put(self, target: WholeTensor, at: int, strides: Sequence[int], tensor: Tensor) -> None:
        size = target.dtype.itemsize
        inner = math.prod(tensor.shape[1:])
        if not tensor.dim() or strides[0] == inner:  # contiguous in the file
            for piece in pieces_in_order(tensor):
                data = memory_of(piece.to(target.dtype).cpu().contiguous())
                self._write(self._files[target.file], data, at)
                at += len(data)
            return
        for place in range(tensor.shape[0]):
            self._put(target, at + place * strides[0] * size, strides[1:], tensor[place])

    @staticmethod
    def _write(descriptor: int, data: memoryview, at: int) -> None:
        while len(data):
            n = os.pwrite(descriptor, data, at)
            data, at = data[n:], at + n
