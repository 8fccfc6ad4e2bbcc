"""Exports the model in the format of the transformers library: configuration, names, tied weights
once, sharded files. Every device writes its own part; no process holds the whole model. Of a model
with peft adapters, only the active adapter is exported."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper.base.atomic import Staged, stage
from piper.base.errors import PiperError
from piper.base.paths import path_of
from piper.base.reading import torch_name
from piper.ir.dag.facts import LOSS_PREFIX
from piper.launch.device.device import WorkerDevice
from piper.launch.device.report import Refusal
from piper.launch.device.worker_group import WorkerGroup, joined
from piper.launch.state.adapters import ADAPTER, Adapter, adapted_part
from piper.launch.state.saving import accepted, known_or_first, tensor_of
from piper.launch.trainer.session import Session
from piper.program.program import Program
from piper.state.checkpoint.hf_export import PRETRAINED, lay_out
from piper.state.checkpoint.slices import MODEL, Slice
from piper.state.checkpoint.tensor_files import Writer
from piper.state.weights.matching import pretrained_part
from piper.state.weights.source import Source


def export(
    session: Session, path: str | Path, *, dtype: torch.dtype | None, file_gb: float
) -> None:
    """``Trainer.export``."""
    with session.undisturbed():
        session.unread.read()
        group, program = session.whole, session.program
        target = Path(os.path.abspath(path_of(path)))
        one = _Export(group, program, session.rest, target, dtype)
        adapted = None if program.source is None else adapted_part(program.source.model)
        if adapted is None:
            one.write(int(file_gb * 10**9))
        else:
            one.write_adapter(Adapter(program, *adapted))


@dataclass(frozen=True, slots=True)
class _Export:
    """A model to write to the folder ``target``."""

    group: WorkerGroup
    program: Program
    rest: Mapping[str, Tensor]
    """Tensors that no device holds, if they no longer have their initial values."""
    target: Path
    dtype: torch.dtype | None

    def write(self, file_bytes: int) -> None:
        """Write all of the model to files of about ``file_bytes``."""

        def prepare() -> tuple[Staged, dict[str, Slice]]:
            staged = stage(self.target, PRETRAINED)
            with staged.failing():
                return staged, lay_out(staged.folder, self._tensors(), file_bytes, staged.named)

        staged, targets = self.group.once(prepare)
        try:
            parts = self.group.call(WorkerDevice.export_part, staged.folder, dict(targets))
        except BaseException:
            staged.discard()
            raise
        self.group.once(lambda rows: self._finish(staged, targets, joined(rows)), parts)

    def write_adapter(self, adapter: Adapter) -> None:
        """Write the tensors of ``adapter``."""
        find = tensor_of(self.group, self.program, self.rest, adapter.names)

        def write() -> None:
            staged = stage(self.target, ADAPTER)
            with staged.failing():
                adapter.write(staged.folder, find, self.dtype)
                staged.commit()

        self.group.once(write)

    def _tensors(self) -> dict[str, Slice]:
        """Every tensor of the model once, under its first name."""
        source, names = given_source(self.program), self.program.names
        known = {**dict(source.parameters()), **dict(source.buffers())}
        prefix, _ = pretrained_part(source.model)
        tensors: dict[str, Slice] = {}
        for key, name in names.keys.items():
            if name in tensors or key.startswith(LOSS_PREFIX):
                continue
            own = known[name].dtype
            kept = self.dtype if self.dtype is not None and own.is_floating_point else own
            tensors[name] = Slice.whole(MODEL, key.removeprefix(prefix), names.shapes[key], kept)
        return tensors

    def _finish(
        self, staged: Staged, targets: Mapping[str, Slice], parts: Iterable[list[str] | Refusal]
    ) -> None:
        with staged.failing():
            written = {name for names in accepted(parts) for name in names}
            find = known_or_first(self.program, self.rest)
            with Writer.opened(staged.folder) as out:
                for name, target in targets.items():
                    if name not in written:
                        out.write(Slice.of(MODEL, name, find(name)), target)
            _, model = pretrained_part(given_source(self.program).model)
            if model is not None:
                _write_config(model, staged.folder, self.dtype)
            staged.commit()


def given_source(program: Program) -> Source:
    """Where the weights of ``program`` come from; refused if it was loaded without."""
    if program.source is None:
        raise PiperError("this program was loaded without its model: give source= to Program.load")
    return program.source


def _write_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    kept = dtype or getattr(model, "dtype", None)
    if kept is not None:
        config.dtype = torch_name(kept)
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
