"""``piper.weights``: a folder of safetensors files as the source of a model's first weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.base.paths import path_of

Init = Callable[[str, Tensor, torch.Generator], None]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files that the first weights are read from, each device its own slices."""

    path: Path
    ignore: tuple[str, ...] = ()
    """Patterns of names that the files may have and the model has not."""
    init: Init | None = None
    """Fills what has no values and is not in the files."""


def weights(
    folder: str | os.PathLike[str], *, ignore: Sequence[str] = (), init: Init | None = None
) -> WeightFiles:
    """The weights in ``folder``, for ``piper.compile(init=)``.

    These are safetensors files: one or several with their index, as the transformers library has
    them, what ``trainer.export`` or ``trainer.save`` wrote, or torch's distributed checkpoint as
    safetensors. Every device reads the slices that it needs. Tensors that the model has not are an
    error unless a pattern in ``ignore``, such as ``"*.attn.bias"``, matches their names. ``init``
    is for buffers that no state dict has, if their modules do not compute them.
    """
    if isinstance(ignore, str) or not all(isinstance(one, str) for one in ignore):
        raise PiperError(f"ignore={ignore!r} must be a list of patterns of names")
    if init is not None and not callable(init):
        raise PiperError(f"init={init!r} must be a function (name, tensor, generator)")
    return WeightFiles(Path(os.path.abspath(path_of(folder))), tuple(ignore), init)
