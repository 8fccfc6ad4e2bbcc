"""``CheckpointReader`` for ``torch.distributed.checkpoint.load``: reads the model's tensors from a
checkpoint of ``trainer.save`` into tensors or DTensors.

    dcp.load(state, storage_reader=CheckpointReader("run/state"))

For output of ``trainer.export``, use torch's own ``HuggingFaceStorageReader``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from piper.state.checkpoint.boxes import Box
from piper.state.checkpoint.discover import stored_tensors
from piper.state.checkpoint.index import Entry
from piper.state.checkpoint.tensor_files import Reader


class CheckpointReader(StorageReader):
    """Reads a model's tensors under the keys of its state dict."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._folder = self._path
        self._entries: dict[str, Entry] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._path = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._folder, self._entries = stored_tensors(self._path)
        return Metadata({key: _metadata(entry) for key, entry in self._entries.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if not self._entries:  # the metadata was read by another process
            self._folder, self._entries = stored_tensors(self._path)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with Reader(self._folder) as reader:
            for item in plan.items:
                entry = self._entries[item.storage_index.fqn]
                begin = item.storage_index.offset or (0,) * len(entry.shape)
                start = map(sum, zip(begin, item.storage_offsets, strict=True))
                into = planner.resolve_tensor(item).detach()
                entry.read(reader, Box(tuple(start), tuple(item.lengths)), into)
                planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).exists()


def _metadata(entry: Entry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(part.box.start), torch.Size(part.box.shape))
        for part in entry.slices
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks
    )
