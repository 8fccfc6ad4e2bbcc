"""The initial values of a device's parameters and buffers, in memory or in files. From files, a
device reads only the slices it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.state.checkpoint.slices import MODEL, Location, Slice
from piper.state.checkpoint.tensor_files import Reader


@dataclass(frozen=True, slots=True)
class FirstTensor:
    """The initial values of a parameter or buffer."""

    slices: Sequence[Slice]
    dtype: torch.dtype
    """The tensor's dtype in the model."""
    folder: Path = Path()
    """The folder of its files."""

    @staticmethod
    def in_memory(name: str, tensor: Tensor) -> FirstTensor:
        return FirstTensor([Slice.of(MODEL, name, tensor)], tensor.dtype)

    @property
    def in_files(self) -> bool:
        return isinstance(self.slices[0].at, Location)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slices[0].shape

    def fill(self, want: Slice, via: torch.dtype) -> None:
        """Copy what ``want`` covers to its memory, rounded to ``via`` on the way."""
        try:
            with Reader(self.folder) as reader:
                reader.fill(want, self.slices, (self.dtype, via))
        except OSError as error:
            raise PiperError(f"{self.folder} cannot be read: {error}") from error

    def whole(self) -> Tensor:
        """The whole tensor."""
        if not self.in_files:
            return self.slices[0].tensor
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.fill(Slice.of(MODEL, self.slices[0].name, tensor), self.dtype)
        return tensor


Fetch = Callable[[str], FirstTensor]
"""Returns the initial values of the parameter or buffer with this name."""
