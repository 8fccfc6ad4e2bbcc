"""``piper.weights``: a folder of safetensors files as the source of a model's initial weights."""

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
    """Files with the initial weights. Each device reads its own slices."""

    path: Path
    ignore: tuple[str, ...] = ()
    """Patterns for names in the files that the model does not have."""
    init: Init | None = None
    """Fills meta tensors that are not in the files."""


def weights(
    folder: str | os.PathLike[str], *, ignore: Sequence[str] = (), init: Init | None = None
) -> WeightFiles:
    """The weights in ``folder``, for ``piper.compile(init=)``.

    The folder holds safetensors files: one file, or several with their index, in the layout of the
    transformers library; output of ``trainer.export`` or ``trainer.save``; or a torch distributed
    checkpoint in safetensors format. Every device reads only the slices it needs. A tensor that the
    model does not have is an error, unless a pattern in ``ignore``, such as ``"*.attn.bias"``,
    matches its name. ``init`` fills non-persistent buffers that their modules do not compute.
    """
    if isinstance(ignore, str) or not all(isinstance(one, str) for one in ignore):
        raise PiperError(f"ignore={ignore!r} must be a list of patterns of names")
    if init is not None and not callable(init):
        raise PiperError(f"init={init!r} must be a function (name, tensor, generator)")
    return WeightFiles(Path(os.path.abspath(path_of(folder))), tuple(ignore), init)
