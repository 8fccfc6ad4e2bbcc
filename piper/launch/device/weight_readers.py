"""Reads a program's initial weights by name: from the model, from files, or from ``init``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from piper.base.errors import PiperError
from piper.state.weights.first_tensors import FirstTensor
from piper.state.weights.source import materialised
from piper.state.weights.weight_files import Init


@dataclass(frozen=True)
class FirstWeights:
    """Everything needed to produce a program's initial weights, in this or another process."""

    given: Mapping[str, Tensor] | Path
    """Every parameter and buffer of the model, or the file that holds them; those to be initialised
    or read are on the meta device."""
    init: Init | None
    located: Mapping[str, FirstTensor]
    """Those in files."""
    seed: int

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        if not isinstance(self.given, Path):
            return self.given
        tensors: dict[str, Tensor] = torch.load(self.given, mmap=True, weights_only=True)
        return tensors

    def in_file(self, path: Path) -> FirstWeights:
        """The same with the tensors in a file, which is written unless it is there."""
        if isinstance(self.given, Path):
            return self
        if not path.exists():
            self.save(path)
        return replace(self, given=path)

    def save(self, file: Path | BinaryIO) -> None:
        """Write the tensors to a file, for ``given``."""
        torch.save({n: x.detach() for n, x in self.tensors.items()}, file)

    def __call__(self, name: str) -> FirstTensor:
        if name not in self.tensors:
            raise PiperError(f"the model has no {name}: it is not the one that was compiled")
        if name in self.located:
            return self.located[name]
        tensor = self.tensors[name]
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        values = materialised(name, tensor, device, self.init, self.seed)
        return FirstTensor.in_memory(name, values)
