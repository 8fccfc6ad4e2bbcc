"""``CheckpointReader`` for ``torch.distributed.checkpoint.load``: reads the model's tensors from a
checkpoint of ``trainer.save`` into tensors or DTensors.

    dcp.load(state, storage_reader=CheckpointReader("run/state"))

For output of ``trainer.export``, use torch's own ``HuggingFaceStorageReader``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
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
from piper.state.checkpoint.slices import Slice
from piper.state.checkpoint.tensor_files import Reader


class CheckpointReader(StorageReader):
    """Reads a model's tensors under the keys of its state dict."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._folder = self._path
        self._tensors: dict[str, Sequence[Slice]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._path = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._folder, self._tensors = stored_tensors(self._path)
        return Metadata({key: _metadata(x) for key, x in self._tensors.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if not self._tensors:  # the metadata was read by another process
            self._folder, self._tensors = stored_tensors(self._path)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with Reader(self._folder) as reader:
            for item in plan.items:
                slices = self._tensors[item.storage_index.fqn]
                begin = item.storage_index.offset or (0,) * len(slices[0].shape)
                start = map(sum, zip(begin, item.storage_offsets, strict=True))
                into = planner.resolve_tensor(item).detach()
                box = Box(tuple(start), tuple(item.lengths))
                reader.fill(replace(slices[0], box=box, at=into), slices)
                planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).exists()


def _metadata(slices: Sequence[Slice]) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(one.box.start), torch.Size(one.box.shape)) for one in slices
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=slices[0].dtype), torch.Size(slices[0].shape), chunks
    )
