"""One device's part of a checkpoint: writes its state, exports its weights, and resumes from files.

A device writes only its own state; devices with equal copies write a share each. It reads only the
slices it needs, directly into its state. It needs only a few megabytes besides its state.
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
    """The part of a state that one device has written, or has in memory."""

    file: str
    facts: FileFacts | None
    """None if nothing was written."""
    tensors: Tensors
    groups: tuple[GroupEntry, ...] = ()
    scheduler: Any = None
    kind: str = ""
    steps: int = 0


def write_part(state: DeviceState, folder: Path, file: str, buffers: Collection[str]) -> Part:
    """Write this device's part of a checkpoint: its share of parameters and optimizer state, and
    the ``buffers`` assigned to it."""
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
    """A part that stays in memory: its file is the device's number, and an offset is the index of a
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
    """Write this device's share of the model's tensors to their places in the exported files.
    Returns their names."""
    written: dict[str, None] = {}
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
                written[fragment.name] = None
        for name in buffers:
            if name in targets:
                tensor = state.buffers[name]
                out.write(targets[name], Box.whole(tensor.shape), tensor)
                written[name] = None
    return list(written)


@torch.no_grad()
def read_part(state: DeviceState, folder: Path, index: Index) -> None:
    """Resume from a checkpoint. Requires that ``refusal`` returned None. If reading still fails,
    the state is partly changed and ``state.changing`` stays True."""
    state.changing = True
    tables = dict(index.tensors.tables())
    with Reader(folder) as reader:
        for want in wanted(state, index):
            tables[want.table][want.name].read(reader, want.box, want.into)
    settle(state, index)
    state.changing = False
