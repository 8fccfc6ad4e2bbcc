"""Sources for the initial values of a device's parameters and buffers: tensors in memory, or
tensors in files. From files, a device reads only the slices it needs."""

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
    """The initial values of a parameter or buffer."""

    def read(self, box: Box, into: Tensor, via: torch.dtype) -> None:
        """Copy ``box`` to ``into``, rounded to ``via`` on the way."""

    def whole(self) -> Tensor:
        """The whole tensor."""


Fetch = Callable[[str], FirstTensor]
"""Returns the initial values of the parameter or buffer with this name."""


@dataclass(frozen=True, slots=True)
class InMemory:
    """A tensor in memory."""

    tensor: Tensor

    def read(self, box: Box, into: Tensor, via: torch.dtype) -> None:
        part = box.of(self.tensor)
        into.copy_(part if into.dtype == via else part.to(via))

    def whole(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True, slots=True)
class InFiles:
    """A tensor in files."""

    folder: Path
    entry: Entry
    dtype: torch.dtype
    """The tensor's dtype in the model."""

    def read(self, box: Box, into: Tensor, via: torch.dtype) -> None:
        try:
            with Reader(self.folder) as reader:
                self.entry.read(reader, box, into, (self.dtype, via))
        except OSError as error:
            raise PiperError(f"{self.folder} cannot be read: {error}") from error

    def whole(self) -> Tensor:
        tensor = torch.empty(self.entry.shape, dtype=self.dtype)
        self.read(Box.whole(self.entry.shape), tensor, self.dtype)
        return tensor
