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
from pathlib import Path

import torch
from torch import Tensor

from piper.base.atomic import FileKind
from piper.state.checkpoint.boxes import row_major
from piper.state.checkpoint.slices import Slice
from piper.state.checkpoint.tensor_files import laid_out, memory_of, pieces_in_order

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PRETRAINED = FileKind(
    "model",
    re.compile(r"(?P<stem>model)(-(?P<number>\d{1,4}))?-\d{5}-of-\d{5}\.safetensors"),
    (WEIGHTS, WEIGHTS_INDEX),
)
"""Markers: the index names several files; a single file is its own marker."""


def lay_out(
    folder: Path, tensors: Mapping[str, Slice], file_bytes: int, named: Callable[[str], str]
) -> dict[str, Slice]:
    """Create files for ``tensors``, none much longer than ``file_bytes``, and their index if there
    are several. The index uses the file names that ``named`` returns. Returns each tensor with its
    place."""
    runs: list[list[str]] = [[]]
    size = 0
    for name, one in tensors.items():
        if runs[-1] and size + one.nbytes > file_bytes:
            runs.append([])
            size = 0
        runs[-1].append(name)
        size += one.nbytes
    placed: dict[str, Slice] = {}
    for place, names in enumerate(runs):
        file = WEIGHTS
        if len(runs) > 1:
            file = f"model-{place + 1:05}-of-{len(runs):05}.safetensors"
        placed |= _make(folder, file, {name: tensors[name] for name in names})
    if len(runs) > 1:
        index = {
            "metadata": {"total_size": sum(one.nbytes for one in tensors.values())},
            "weight_map": {one.key: named(one.location.file) for one in placed.values()},
        }
        (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2))
    return placed


def _make(folder: Path, file: str, tensors: Mapping[str, Slice]) -> dict[str, Slice]:
    header, placed = laid_out(file, tensors.values())
    with (folder / file).open("xb") as content:
        content.write(header)
        content.truncate(len(header) + sum(one.nbytes for one in tensors.values()))
    by_key = {target.key: target for _, target in placed}
    return {name: by_key[one.key] for name, one in tensors.items()}


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

    def write(self, source: Slice, target: Slice) -> None:
        """Write ``source`` to its place in the whole tensor ``target``."""
        file = target.location.file
        if file not in self._files:
            self._files[file] = os.open(self._folder / file, os.O_WRONLY)
        strides = row_major(target.shape)
        at = target.location.offset + source.box.offset(strides) * target.dtype.itemsize
        self._put(self._files[file], target.dtype, at, strides, source.tensor.detach())

    def _put(
        self, file: int, dtype: torch.dtype, at: int, strides: Sequence[int], tensor: Tensor
    ) -> None:
        if not tensor.dim() or strides[0] == math.prod(tensor.shape[1:]):  # contiguous in the file
            for piece in pieces_in_order(tensor):
                data = memory_of(piece.to(dtype).cpu().contiguous())
                self._write(file, data, at)
                at += len(data)
            return
        for row in tensor:
            self._put(file, dtype, at, strides[1:], row)
            at += strides[0] * dtype.itemsize

    @staticmethod
    def _write(descriptor: int, data: memoryview, at: int) -> None:
        while len(data):
            n = os.pwrite(descriptor, data, at)
            data, at = data[n:], at + n
