"""Matches the tensors in weight files to the tensors of a model, by name.

A tensor that is missing in the files, has another shape or kind there, or is not in the model is an
error. The message names the tensor and, where there is one, its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from piper.base.errors import PiperError
from piper.ir.dag.facts import LOSS_PREFIX
from piper.ir.grouped import grouped
from piper.state.checkpoint.boxes import Box
from piper.state.checkpoint.discover import stored_tensors
from piper.state.checkpoint.slices import Slice
from piper.state.checkpoint.tensor_files import BLOCK, Reader
from piper.state.weights.first_tensors import FirstTensor
from piper.state.weights.other_model import differences
from piper.state.weights.source import Source, StateNames
from piper.state.weights.weight_files import WeightFiles


def located(source: Source, names: StateNames, files: WeightFiles) -> dict[str, FirstTensor]:
    """By first name, where every tensor of the model's state dict is in files. Tensors of the loss
    may be missing."""
    folder, there = stored_tensors(files.path)
    tensors = {**dict(source.buffers()), **dict(source.parameters())}
    matched: dict[str, FirstTensor] = {}
    used = set(names.added)
    missing = []
    shapes: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
    for name, keys in grouped((name, key) for key, name in names.keys.items()).items():
        written = [one for key in keys for one in _variants(key, source, names) if one in there]
        used.update(written)
        own = names.shapes[keys[0]]
        given = {one: there[one][0].shape for one in written}
        shapes |= {one: (shape, own) for one, shape in given.items() if shape != own}
        for one in written:
            _check_dtype(one, there[one], tensors[name].dtype, folder)
        for other in written[1:] if not shapes else ():
            _refuse_different(folder, there, written[0], other, tensors[name].dtype)
        if written:
            matched[name] = FirstTensor(there[written[0]], tensors[name].dtype, folder)
        elif not name.startswith(LOSS_PREFIX):
            missing.append(keys[0])
    for name in tensors.keys() - set(names.keys.values()):  # buffers that are not persistent
        used.update(_variants(name, source, names))
    left = [one for one in there if one not in used]
    extra = [one for one in left if not any(fnmatchcase(one, pat) for pat in files.ignore)]
    notes = {one: f" (in {_file(Path(), there[one])})" for one in extra}
    if text := differences(names.shapes, missing, notes, shapes):
        advice = "" if not extra else (
            ". Patterns in piper.weights(folder, ignore=[...]) leave such tensors aside"
        )  # fmt: skip
        raise PiperError(f"the weights in {files.path} are not this model's. {text}{advice}")
    return matched


def _variants(key: str, source: Source, names: StateNames) -> list[str]:
    """Names that files may use for a tensor: the model's own key, the key without the wrapper
    around a transformers model, and that key with or without ``base_model_prefix``. No variant is
    the key of another tensor."""
    outer, model = pretrained_part(source.model)
    variants = [key]
    if key.startswith(outer):
        inner = key.removeprefix(outer)
        base = getattr(model, "base_model_prefix", "") or ""
        variants.append(inner)
        if base:
            variants += [inner.removeprefix(f"{base}."), f"{base}.{inner}"]
    others = (name for name in dict.fromkeys(variants) if name not in names.keys and name != key)
    return [key, *others]


def pretrained_part(model: nn.Module) -> tuple[str, nn.Module | None]:
    """The part of a model that has a transformers configuration, and the prefix of its names. It is
    the model itself or its only such child; otherwise the prefix is empty and the part is None."""
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        return "", model
    inner = [
        (f"{name}.", child)
        for name, child in model.named_children()
        if hasattr(getattr(child, "config", None), "save_pretrained")
    ]
    return inner[0] if len(inner) == 1 else ("", None)


def _check_dtype(key: str, slices: Sequence[Slice], dtype: torch.dtype, folder: Path) -> None:
    own = slices[0].dtype
    if own != dtype and not (own.is_floating_point and dtype.is_floating_point):
        raise PiperError(
            f"{key} is {own} in {_file(folder, slices)}, but {dtype} in the model: only "
            "floating-point types are converted into each other"
        )


def _file(folder: Path, slices: Sequence[Slice]) -> Path:
    return folder / slices[0].location.file


def _refuse_different(
    folder: Path,
    there: Mapping[str, Sequence[Slice]],
    key: str,
    other: str,
    dtype: torch.dtype,
) -> None:
    """Refuse tied tensors whose values differ in the files."""
    with Reader(folder) as reader:
        for box in Box.whole(there[key][0].shape).cut(BLOCK // 8):
            values = [torch.empty(box.shape, dtype=dtype) for _ in range(2)]
            for name, value in zip((key, other), values, strict=True):
                reader.fill(replace(there[name][0], box=box, at=value), there[name])
            if not torch.equal(*values):
                raise PiperError(
                    f"{key} and {other} are tied in the model, but differ in "
                    f"{_file(folder, there[key])} and {_file(folder, there[other])}"
                )
