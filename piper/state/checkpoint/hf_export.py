"""Weights as ``from_pretrained`` of the transformers library loads them: whole tensors under the
model's own names, in one or several safetensors files.

Files are laid out first, at their full length; then everyone writes the slices that it has to where
they belong. Nobody holds a tensor that it has not.
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
"""Several files are named by the index; one file names itself."""


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """Where a whole tensor is to lie."""

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
    """Make the files for ``tensors``, none of them much longer than ``file_bytes``, and the index
    that goes with them, in which they have the names that ``named`` gives; and say where each
    tensor is to lie."""
    runs: list[list[str]] = [[]]
    size = 0
    for name, one in tensors.items():
        if runs[-1] and size + one.nbytes > file_bytes:
            runs.append([])
            size = 0
        runs[-1].append(name)
        size += one.nbytes
    found: dict[str, WholeTensor] = {}
    for place, names in enumerate(runs):
        file = WEIGHTS
        if len(runs) > 1:
            file = f"model-{place + 1:05}-of-{len(runs):05}.safetensors"
        found |= _make(folder, file, {name: tensors[name] for name in names})
    if len(runs) > 1:
        index = {
            "metadata": {"total_size": sum(one.nbytes for one in tensors.values())},
            "weight_map": {one.key: named(one.file) for one in found.values()},
        }
        (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2))
    return found


def _make(folder: Path, file: str, tensors: Mapping[str, WholeTensor]) -> dict[str, WholeTensor]:
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header = header_of([(x.key, x.dtype, x.shape) for x in (tensors[name] for name in names)])
    at = len(header)
    found = {}
    for name in names:
        one = tensors[name]
        found[name] = WholeTensor(one.key, one.dtype, one.shape, file, at)
        at += one.nbytes
    with (folder / file).open("xb") as content:
        content.write(header)
        content.truncate(at)
    return found


class SliceWriter:
    """Writes slices of tensors to where they are to lie."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    @staticmethod
    @contextmanager
    def opened(folder: Path) -> Iterator[SliceWriter]:
        """All is on the disk in the end."""
        writer = SliceWriter(folder)
        try:
            yield writer
            for descriptor in writer._files.values():
                os.fsync(descriptor)
        finally:
            for descriptor in writer._files.values():
                os.close(descriptor)

    def write(self, target: WholeTensor, box: Box, tensor: Tensor) -> None:
        """Put ``tensor`` at ``box`` of ``target``."""
        if target.file not in self._files:
            self._files[target.file] = os.open(self._folder / target.file, os.O_WRONLY)
        strides = [math.prod(target.shape[i + 1 :]) for i in range(len(target.shape))]
        first = sum(a * s for a, s in zip(box.start, strides, strict=True))
        self._put(target, target.offset + first * target.dtype.itemsize, strides, tensor.detach())

    def _put(self, target: WholeTensor, at: int, strides: Sequence[int], tensor: Tensor) -> None:
        size = target.dtype.itemsize
        inner = math.prod(tensor.shape[1:])
        if not tensor.dim() or strides[0] == inner:  # its rows lie one after another
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
