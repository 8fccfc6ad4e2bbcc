"""The input of one device: its plans, their executables, and the description of its state. A worker
gets this from its parent, and nothing else of the program."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from piper.capture.code.codegen import Compiler
from piper.capture.code.executables import Executables
from piper.ir.ops import Compute, Group
from piper.ir.passes import Kind, Ref
from piper.ir.plan.plan import Plan
from piper.ir.rules import Bucket, StreamRule
from piper.ir.shards import RANK
from piper.ir.tensors import TensorSpec
from piper.state.optimizer.training import Training


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """Everything that a device needs to run a program."""

    device: int
    devices: Group
    """All devices of the program."""
    kind: torch.device
    """The kind of device that the program was compiled for."""
    compiler: Compiler
    steps: tuple[tuple[Plan, Executables], tuple[Plan, Executables]]
    """Plan and executables of training and of evaluation."""
    streams: Mapping[str, StreamRule]
    buckets: Mapping[int, Bucket]
    """The buckets of which this device has a part, by number."""
    parameters: Mapping[str, TensorSpec]
    """Shapes and dtypes of their unsharded parameters, as the executables take them."""
    order: tuple[str, ...]
    """Names of parameters and buffers, in the model's order."""
    training: Training
    gives: Collection[str]
    """The buffers that this device gives to a checkpoint or a switch: those that no earlier device
    has."""
    tokens: int = 0
    """Tokens of a batch."""


def buffers_of(*steps: tuple[Plan, Executables]) -> dict[str, TensorSpec]:
    """The buffers of the chunks that the plans run."""
    buffers: dict[str, TensorSpec] = {}
    for plan, code in steps:
        programs = next(iter(code.programs.values()), ())
        chunks = {x.op.chunk for x in plan.instructions if isinstance(x.op, Compute)}
        for chunk in sorted(chunks):
            for place, name in enumerate(code.pieces[chunk].buffers):
                if name not in code.constants and not name.startswith(RANK):
                    buffers[name] = programs[chunk].specs[Ref(Kind.BUFFER, place)]
    return buffers
