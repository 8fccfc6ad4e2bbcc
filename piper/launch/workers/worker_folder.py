"""Writes the files that worker processes read: a program, its callables, and initial weights."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from piper.base.errors import PiperError
from piper.launch.device.weight_readers import FirstWeights
from piper.launch.workers.pickling import by_value
from piper.program.program import Program
from piper.state.weights.weight_files import WeightFiles


def write_program(folder: Path, name: str, program: Program) -> None:
    """Write a program and its callables."""
    program.save(folder / name)
    init = None if program.source is None else program.source.init
    if isinstance(init, WeightFiles):
        init = init.init
    training = program.training
    try:
        callables = by_value((training.optimizer, training.scheduler, init))
    except Exception as error:
        raise PiperError(
            f"optimizer=, scheduler= or init= cannot be sent to other processes: {error}"
        ) from error
    (folder / f"{name}.callables").write_bytes(callables)


def write_weights(folder: Path, program: Program) -> None:
    """Write the initial weights, or where to read them."""
    first = FirstWeights.of(program)
    torch.save({n: x.detach() for n, x in first.tensors.items()}, folder / "weights.pt")
    (folder / "located").write_bytes(pickle.dumps(first.located))
