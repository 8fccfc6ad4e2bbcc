"""Export for ``from_pretrained`` of the transformers library: whole tensors under the model's own
names, in one or several safetensors files.

``lay_out`` first creates the files at their full length. Then each worker writes its own slices in
place. No worker gathers a whole tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from piper.base.atomic import FileKind
from piper.state.checkpoint.slices import Slice, runs
from piper.state.checkpoint.tensor_files import Writer

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
    files = list(runs(tensors, lambda name: tensors[name].nbytes, file_bytes)) or [[]]
    placed: dict[str, Slice] = {}
    with Writer.opened(folder) as out:
        for place, names in enumerate(files, 1):
            file = WEIGHTS
            if len(files) > 1:
                file = f"model-{place:05}-of-{len(files):05}.safetensors"
            _, targets = out.create(file, (tensors[name] for name in names))
            by_key = {target.key: target for _, target in targets}
            placed |= {name: by_key[tensors[name].key] for name in names}
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(one.nbytes for one in tensors.values())},
            "weight_map": {one.key: named(one.location.file) for one in placed.values()},
        }
        (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2))
    return placed
