"""Training text that every machine has: the source of the Python standard library, as bytes.

`stdlib_bytes` reads it; `ByteBatches` cuts it into (x, y) batches, y one byte ahead of x.
The same arguments and step always give the same batch, so that a resumed run sees the same data.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from piper.base.errors import PiperError

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


def stdlib_bytes(limit: int | None = None) -> Tensor:
    """The source text of the running Python's standard library; see `source_bytes`."""
    return source_bytes(Path(sysconfig.get_path("stdlib")), limit)


def source_bytes(root: Path, limit: int | None = None) -> Tensor:
    """The .py files under `root`, concatenated (uint8 [bytes]) and cut off after `limit` bytes.

    Files are ordered by path. Installed packages, tests and unreadable files are left out.
    """
    if limit is not None and limit < 1:
        raise PiperError(f"limit={limit}: must be at least 1, or None for all of the text")
    text = bytearray()
    for path in _source_files(root):
        try:
            text += path.read_bytes()
        except OSError:
            continue
        if limit is not None and len(text) >= limit:
            del text[limit:]
            break
    if not text:
        raise PiperError(
            f"no text in .py files under {root}: is the Python source installed there?"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def _source_files(root: Path) -> list[Path]:
    """All .py files under root outside the skipped folders, ordered by relative path."""
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        # Pruned here, not filtered later: site-packages may have far more files than the library.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


class ByteBatches:
    """Batches of random windows of a text: `batches[step]` -> (x, y), int64 [batch, seq] each.

    Iteration yields steps 0, 1, 2, … without end. The last `valid_fraction` of the text is held
    out: no window of one split reads a byte of the other.
    """

    def __init__(
        self,
        text: Tensor,
        *,
        batch: int,
        seq: int,
        seed: int = 0,
        split: Literal["train", "valid"] = "train",
        valid_fraction: float = 0.1,
    ) -> None:
        if text.ndim != 1 or text.dtype != torch.uint8:
            raise PiperError(
                f"text is {text.dtype} {list(text.shape)}: must be one-dimensional uint8, "
                "as stdlib_bytes() returns it"
            )
        if batch < 1 or seq < 1:
            raise PiperError(f"batch={batch}, seq={seq}: both must be at least 1")
        if split not in ("train", "valid"):
            raise PiperError(f"split={split!r}: must be 'train' or 'valid'")
        if not 0 <= valid_fraction < 1:
            raise PiperError(f"valid_fraction={valid_fraction}: must be at least 0 and less than 1")
        cut = len(text) - int(len(text) * valid_fraction)
        self.text = text[:cut] if split == "train" else text[cut:]
        if len(self.text) < seq + 1:
            raise PiperError(
                f"the {split} split has {len(self.text)} of the text's {len(text)} bytes, fewer "
                f"than the {seq + 1} that a sequence of seq={seq} and its next byte need: "
                "use a shorter seq, a longer text or another valid_fraction"
            )
        self.batch, self.seq, self.seed, self.split = batch, seq, seed, split

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        if step < 0:
            raise PiperError(f"step={step}: batches are numbered from 0 and have no end")
        # A hash, so that neighbouring seeds and steps do not share batches.
        key = f"{self.seed} {self.split} {step}".encode()
        digest = hashlib.blake2b(key, digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        starts = torch.randint(len(self.text) - self.seq, (self.batch, 1), generator=generator)
        window = self.text[starts + torch.arange(self.seq + 1)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(self.__getitem__, count())
