"""One device's part of a checkpoint: what it writes of its state, and how it reads another's.

A device writes only what it has, and of equal copies each writes a share. It reads just the slices
that it needs, straight to where they are kept: beside its state it holds a few megabytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper.state.checkpoint.boxes import Box
from piper.state.checkpoint.hf_export import SliceWriter, WholeTensor
from piper.state.checkpoint.index import GroupEntry, Index, Tensors
from piper.state.checkpoint.tensor_files import FileFacts, Reader, TensorToWrite, write_file
from piper.state.device.device_state import DeviceState
from piper.state.device.holding import Holding
from piper.state.device.pieces import pieces_of, written_by
from piper.state.device.restore import settle, wanted
from piper.state.device.slices import given_by


@dataclass(frozen=True, slots=True)
class Part:
    """What one device has written, or has in memory."""

    file: str
    facts: FileFacts | None
    """None if nothing was written."""
    tensors: Tensors
    groups: tuple[GroupEntry, ...] = ()
    scheduler: Any = None
    kind: str = ""
    steps: int = 0


def write_part(state: DeviceState, folder: Path, file: str, buffers: Collection[str]) -> Part:
    """Write what this device gives to a checkpoint: its share of parameters and of the optimizer's
    state, and the ``buffers`` that are its to write."""
    return write(given_by(state, buffers), folder, file)


def write(holding: Holding, folder: Path, file: str) -> Part:
    """Write ``holding`` to a file."""
    facts, places = None, []
    if holding.slices:
        given = [_given(held.key, held.tensor) for held in holding.slices]
        written = write_file(folder / file, given)
        facts = written.facts
        places = [(file, x.key, *written.tensors[x.key]) for x in given]
    return _part(holding, file, facts, holding.tensors(places))


def in_memory(holding: Holding, device: int) -> Part:
    """The part of a state that is not written: its file is the device, an offset the number of a
    slice in ``holding``."""
    places = ((str(device), held.key, i, 0) for i, held in enumerate(holding.slices))
    return _part(holding, str(device), None, holding.tensors(places))


def _given(key: str, tensor: Tensor | TensorToWrite) -> TensorToWrite:
    return tensor if isinstance(tensor, TensorToWrite) else TensorToWrite.of(key, tensor)


def _part(holding: Holding, file: str, facts: FileFacts | None, tensors: Tensors) -> Part:
    return Part(
        file, facts, tensors, holding.groups, holding.scheduler, holding.kind, holding.steps
    )


def export_part(
    state: DeviceState, folder: Path, targets: Mapping[str, WholeTensor], buffers: Collection[str]
) -> list[str]:
    """Write this device's share of the model's tensors to where they are to lie; their names."""
    found: dict[str, None] = {}
    with SliceWriter.opened(folder) as out:
        for held in state.held.values():
            layout = held.layout
            for _, fragment in written_by(layout):
                if fragment.name not in targets:
                    continue
                row = held.updated[fragment.start : fragment.stop]
                for piece in pieces_of(layout, fragment):
                    tensor = piece.of_range(row, layout, fragment)
                    out.write(targets[fragment.name], piece.whole, tensor)
                found[fragment.name] = None
        for name in buffers:
            if name in targets:
                tensor = state.buffers[name]
                out.write(targets[name], Box.whole(tensor.shape), tensor)
                found[name] = None
    return list(found)


@torch.no_grad()
def read_part(state: DeviceState, folder: Path, index: Index) -> None:
    """Resume from a checkpoint. ``refusal`` has found nothing; whatever fails all the same leaves
    the state half changed, and said to be so."""
    state.changing = True
    tables = dict(index.tensors.tables())
    with Reader(folder) as reader:
        for one in wanted(state, index):
            tables[one.table][one.name].read(reader, one.box, one.into)
    settle(state, index)
    state.changing = False
