"""Gives a program's first weights by name."""

from __future__ import annotations

import torch
from torch import Tensor

from piper.errors import PiperError
from piper.program import Program
from piper.runtime.state import Fetch
from piper.weights import materialised


def fetcher(program: Program) -> Fetch:
    """A function from the name of a parameter or buffer to its whole first value."""
    source = program.source
    if source is None:
        raise PiperError(
            "this program was loaded without weights: give source= to Program.load, for instance "
            "piper.Source(model)"
        )
    known: dict[str, Tensor] = {**dict(source.parameters()), **dict(source.buffers())}

    def fetch(name: str) -> Tensor:
        if name not in known:
            raise PiperError(f"the model has no {name}: it is not the one that was compiled")
        device = torch.device("cpu") if known[name].is_meta else known[name].device
        return materialised(name, known[name], device, source.init, program.training.seed)

    return fetch
