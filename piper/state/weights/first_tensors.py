"""Where a device takes the first values of its parameters and buffers from: tensors in memory, or
tensors in files, of which it reads the slices that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.state.checkpoint.boxes import Box
from piper.state.checkpoint.index import Entry
from piper.state.checkpoint.tensor_files import Reader


class FirstTensor(Protocol):
    """The first values of a parameter or buffer."""

    def read(self, box: Box, into: Tensor, via: torch.dtype) -> None:
        """Copy ``box`` to ``into``, rounded to ``via`` on the way."""

    def whole(self) -> Tensor:
        """All of it."""


Fetch = Callable[[str], FirstTensor]
"""Gives the first values of what has a name."""


@dataclass(frozen=True, slots=True)
class InMemory:
    """A tensor that is there."""

    tensor: Tensor

    def read(self, box: Box, into: Tensor, via: torch.dtype) -> None:
        found = box.of(self.tensor)
        into.copy_(found if into.dtype == via else found.to(via))

    def whole(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True, slots=True)
class InFiles:
    """A tensor in files."""

    folder: Path
    entry: Entry
    dtype: torch.dtype
    """What the model has it in."""

    def read(self, box: Box, into: Tensor, via: torch.dtype) -> None:
        try:
            with Reader(self.folder) as reader:
                self.entry.read(reader, box, into, (self.dtype, via))
        except OSError as error:
            raise PiperError(f"{self.folder} cannot be read: {error}") from error

    def whole(self) -> Tensor:
        found = torch.empty(self.entry.shape, dtype=self.dtype)
        self.read(Box.whole(self.entry.shape), found, self.dtype)
        return found
