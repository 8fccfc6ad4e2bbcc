"""Exports the model in the format of the transformers library: configuration, names, tied weights
once, sharded files. Every device writes its own part; no process holds the whole model. Of a model
with peft adapters, only the active adapter is exported."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
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
from piper.launch.device.worker_group import WorkerGroup, answers_of_all, joined
from piper.launch.state.adapters import ADAPTER, Adapter, adapted_part
from piper.launch.state.saving import accepted, known_or_first, tensor_of
from piper.program.program import Program
from piper.state.checkpoint.hf_export import PRETRAINED, lay_out
from piper.state.checkpoint.slices import MODEL, Slice
from piper.state.checkpoint.tensor_files import Writer
from piper.state.weights.matching import pretrained_part
from piper.state.weights.source import Source


def export(
    group: WorkerGroup,
    program: Program,
    path: str | Path,
    rest: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None,
    file_bytes: int,
) -> None:
    """Write the model to the folder ``path``. ``rest`` are tensors that no device holds, if they no
    longer have their initial values."""
    target = Path(os.path.abspath(path_of(path)))
    adapted = None if program.source is None else adapted_part(program.source.model)
    if adapted is not None:
        _export_adapter(group, program, target, rest, Adapter(program, *adapted), dtype)
        return

    def prepare() -> tuple[Staged, dict[str, Slice]]:
        staged = stage(target, PRETRAINED)
        with staged.failing():
            tensors = _tensors(program, dtype)
            return staged, lay_out(staged.folder, tensors, file_bytes, staged.named)

    staged, targets = group.once(prepare)
    try:
        parts = group.call(WorkerDevice.export_part, staged.folder, dict(targets))
    except BaseException:
        staged.discard()
        raise
    group.once(lambda rows: _finish(program, staged, targets, joined(rows), rest, dtype), parts)


def _export_adapter(
    group: WorkerGroup,
    program: Program,
    target: Path,
    rest: Mapping[str, Tensor],
    adapter: Adapter,
    dtype: torch.dtype | None,
) -> None:
    portions = answers_of_all(group, group.call(WorkerDevice.export, adapter.names))
    find = tensor_of(program, portions, rest)

    def write() -> None:
        staged = stage(target, ADAPTER)
        with staged.failing():
            adapter.write(staged.folder, find, dtype)
            staged.commit()

    group.once(write)


def given_source(program: Program) -> Source:
    """Where the weights of ``program`` come from; refused if it was loaded without."""
    if program.source is None:
        raise PiperError("this program was loaded without its model: give source= to Program.load")
    return program.source


def _tensors(program: Program, dtype: torch.dtype | None) -> dict[str, Slice]:
    """Every tensor of the model once, under its first name."""
    source = given_source(program)
    known = {**dict(source.parameters()), **dict(source.buffers())}
    prefix, _ = pretrained_part(source.model)
    tensors = {}
    for key, name in program.names.keys.items():
        if name in tensors or key.startswith(LOSS_PREFIX):
            continue
        own = known[name].dtype
        kept = dtype if dtype is not None and own.is_floating_point else own
        shape = program.names.shapes[key]
        tensors[name] = Slice.whole(MODEL, key.removeprefix(prefix), shape, kept)
    return tensors


def _finish(
    program: Program,
    staged: Staged,
    targets: Mapping[str, Slice],
    parts: Iterable[list[str] | Refusal],
    rest: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> None:
    folder = staged.folder
    with staged.failing():
        written = {name for names in accepted(parts) for name in names}
        find = known_or_first(program, rest)
        with Writer.opened(folder) as out:
            for name, target in targets.items():
                if name not in written:
                    out.write(Slice.of(MODEL, name, find(name)), target)
        assert program.source is not None
        _, model = pretrained_part(program.source.model)
        if model is not None:
            _write_config(model, folder, dtype)
        staged.commit()


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
